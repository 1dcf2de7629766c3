/* Order: which accesses to memory are certain to come after which, whatever the schedule.

   Every agent (a warp; an asynchronous unit, see machine.h) has a clock. A warp's vector clock `done[agent]` says up to which clock
   value the agent's accesses are known to precede what the warp does next; barriers and waits join vector clocks. A second vector,
   `fenced`, says which of those accesses a proxy fence has since made visible to the async proxy (TMA, wgmma, tcgen05): the fence may
   stand anywhere on the path from the write to the asynchronous read, as in PTX's memory model.

   Every cell of shared and tensor memory carries the number of a history: its last write and the reads since then. Histories are
   immutable and shared, so that a tile that one instruction wrote costs one record, and a check over many cells with one history
   is made once. History 0 is memory that nothing ever wrote. */
#include "machine.h"
#include <stdlib.h>

Clock clock_new(Machine *m) {
    uint32_t *memory = calloc(2 * (size_t)m->agents, sizeof(uint32_t));
    return (Clock){memory, memory + m->agents};
}

void clock_free(Clock c) { free(c.done); }

static void join(uint32_t *restrict into, const uint32_t *restrict from, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

void clock_join(Machine *m, Clock into, Clock from) {
    join(into.done, from.done, 2 * m->agents);         /* `fenced` lies behind `done` */
}

void clock_clear(Machine *m, Clock c) { memset(c.done, 0, 2 * (size_t)m->agents * sizeof(uint32_t)); }

void release(Machine *m, Warp *w, Clock into) {
    clock_join(m, into, w->clock);
    w->clock.done[agent(w, AGENT_WARP)]++;
}

typedef struct {
    Access write;                /* agent == NOBODY: never written */
    uint32_t n_reads;
    Access *reads;
} History;

enum { NOBODY = 0xffffffff };
static History *histories;
static uint32_t n_histories, capacity;

typedef struct { uint32_t from, agent, clock, to; int32_t pc; uint32_t kind; } Step;
static Step *steps;              /* hash table of history -> access -> history */
enum { STEPS = 1 << 16 };

static struct Block { struct Block *next; size_t used; Access space[8192]; } *blocks;

static Access *new_accesses(uint32_t n) {
    if (n > 8192) abort();
    if (!blocks || blocks->used + n > 8192) {
        struct Block *b = malloc(sizeof *b);
        b->next = blocks, b->used = 0, blocks = b;
    }
    Access *a = blocks->space + blocks->used;
    blocks->used += n;
    return a;
}

void history_reset(void) {
    if (!steps) steps = malloc(STEPS * sizeof *steps);
    memset(steps, 0xff, STEPS * sizeof *steps);
    while (blocks) {
        struct Block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
    if (!histories) histories = malloc((capacity = 4096) * sizeof *histories);
    histories[0] = (History){{NOBODY, 0, -1, GENERIC, WRITE}, 0, NULL};
    n_histories = 1;
}

static uint32_t new_history(Access write, const History *old, const Access *added) {
    if (n_histories == capacity) histories = realloc(histories, (capacity *= 2) * sizeof *histories);
    History h = {write, 0, NULL};
    if (added) {
        h.reads = new_accesses(old->n_reads + 1);
        for (uint32_t i = 0; i < old->n_reads; i++) {
            const Access *r = &old->reads[i];
            if (r->agent == added->agent && r->kind == added->kind && r->clock <= added->clock) continue;  /* the later read implies it */
            h.reads[h.n_reads++] = *r;
        }
        h.reads[h.n_reads++] = *added;
    }
    histories[n_histories] = h;
    return n_histories++;
}

static int in_order_unit(uint32_t a) {   /* tcgen05 operations of one thread run in the order of their issue */
    a %= AGENTS;
    return (a >= AGENT_TCGEN && a < AGENT_TCGEN + MAX_WARPS) || a < MAX_WARPS;
}

static int precedes(const Access *old, const Warp *issuer, const Access *new) {
    if (old->agent == new->agent && in_order_unit(old->agent)) return 1;
    if (issuer->clock.done[old->agent] >= old->clock) return 1;
    return old->agent == agent(issuer, AGENT_WARP);        /* what the issuing warp itself did before */
}

static const char *name_of(const Access *a) {
    uint32_t k = a->agent % AGENTS;
    if (k < AGENT_BULK) return a->kind == WRITE ? "a store" : a->kind == READ ? "a load" : "an atomic";
    if (k < AGENT_WGMMA) return "a bulk copy out of shared memory";
    if (k < AGENT_TCGEN) return "a wgmma operand read";
    if (k < AGENT_CPASYNC) return a->kind == WRITE ? "a tcgen05 operation's write" : "a tcgen05 operation's operand read";
    if (k < AGENT_TMEM_LD) return "a cp.async";
    if (k < AGENT_TMEM_ST) return "a tcgen05.ld";
    if (k < AGENT_MBARRIER) return "a tcgen05.st";
    return "a bulk copy into shared memory";
}

static void conflict(Machine *m, const Access *old, const Access *new, const char *space, uint32_t address) {
    uint32_t rank = old->agent / AGENTS, k = old->agent % AGENTS;
    if (k < AGENT_MBARRIER)
        finding(m, "race", old->pc, 0, "%s at %s address %u is not ordered after %s by warp %u of CTA rank %u", name_of(new), space, address,
                name_of(old), k % MAX_WARPS, rank);
    else
        finding(m, "race", old->pc, 0, "%s at %s address %u is not ordered after %s (phase %u of mbarrier %u of CTA rank %u)", name_of(new),
                space, address, name_of(old), old->clock, k - AGENT_MBARRIER, rank);
}

static void check(Machine *m, Warp *issuer, const History *h, const Access *new, const char *space, uint32_t address) {
    const Access *old = &h->write;
    if (old->agent == NOBODY) {
        if (new->kind != WRITE) finding(m, "uninitialised", -1, 0, "%s reads %s address %u, which nothing has written", name_of(new), space, address);
    } else if (!precedes(old, issuer, new)) {
        conflict(m, old, new, space, address);
    } else if (old->proxy == GENERIC && new->proxy == ASYNC && issuer->clock.fenced[old->agent] < old->clock) {
        finding(m, "missing proxy fence", old->pc, 0, "%s at %s address %u follows a generic store with no fence.proxy.async between them",
                name_of(new), space, address);
    }
    for (uint32_t i = 0; i < h->n_reads; i++) {
        old = &h->reads[i];
        if (new->kind == READ && old->kind == READ) continue;
        if (new->kind == ATOMIC && old->kind == ATOMIC) continue;
        if (!precedes(old, issuer, new)) conflict(m, old, new, space, address);
    }
}

static uint32_t step(Machine *m, Warp *issuer, uint32_t from, const Access *a, const char *space, uint32_t address) {
    uint32_t hash = (from * 0x9e3779b1u ^ a->agent * 0x85ebca6bu ^ a->clock * 0xc2b2ae35u ^ (uint32_t)a->pc * 0x27d4eb2fu ^ a->kind);
    Step *s = &steps[(hash ^ hash >> 15) & (STEPS - 1)];
    if (m->strict) check(m, issuer, &histories[from], a, space, address);
    if (s->from == from && s->agent == a->agent && s->clock == a->clock && s->pc == a->pc && s->kind == a->kind) return s->to;
    History old = histories[from];
    uint32_t to = a->kind == WRITE ? new_history(*a, NULL, NULL) : new_history(old.write, &old, a);
    *s = (Step){from, a->agent, a->clock, to, a->pc, a->kind};
    return to;
}

void touch(Machine *m, Warp *issuer, uint32_t *history, uint32_t count, Access a, const char *space, uint32_t address, uint32_t unit) {
    uint32_t from = NOBODY, to = NOBODY;
    for (uint32_t i = 0; i < count; i++) {
        if (history[i] == to && a.kind != WRITE) continue;    /* this access already stands in it */
        if (history[i] != from) {
            from = history[i];
            to = step(m, issuer, from, &a, space, address + i * unit);
        }
        history[i] = to;
    }
}

void touch_shared(Machine *m, Warp *issuer, Cta *owner, uint32_t offset, uint32_t bytes, Access access) {
    if (!m->strict) return;
    if (access.kind == WRITE && access.proxy == GENERIC) memset(owner->tile_swizzle + offset / 16, 0, (offset % 16 + bytes + 15) / 16);
    touch(m, issuer, owner->shared_history + offset / 2, (offset % 2 + bytes + 1) / 2, access, "shared", offset, 2);
}

/* Lanes of one warp: what one stored, another may read (and what one read, another may overwrite) only after they met at a barrier. */
void lanes_meet(Warp *w) { w->sync++; }

void touch_lane(Machine *m, Warp *w, Cta *owner, uint32_t offset, uint32_t bytes, int lane, access_kind_t kind) {
    if (!m->strict || owner != w->cta || kind == ATOMIC) return;
    uint32_t mine = (w->sync + 1) << 11 | (uint32_t)w->index << 5 | (uint32_t)lane, many = 1u << 10;
    for (uint32_t i = offset / 2; i <= (offset + bytes - 1) / 2; i++) {
        LaneTouch *t = &owner->lane_history[i];
        uint32_t other = kind == READ ? t->write : t->read;
        if (other != mine && (other ^ mine) >> 11 == 0 && ((other ^ mine) >> 5 & 31) == 0) {
            finding(m, "race", -1, 1u << lane, "lane %d %s shared address %u after %s %s it, with no bar.warp.sync or other barrier between them", lane,
                    kind == READ ? "reads" : "writes", 2 * i, other & many ? "several lanes" : "another lane", kind == READ ? "wrote" : "read");
            return;
        }
        if (kind == WRITE) t->write = mine;
        else if (t->read != mine) t->read = (t->read ^ mine) >> 11 == 0 && (t->read >> 5 & 31) == (uint32_t)w->index ? mine | many : mine;
    }
}

Access own_access(Warp *w, access_kind_t kind) {
    uint32_t a = agent(w, AGENT_WARP);
    return (Access){a, w->clock.done[a], pc_of(w), GENERIC, kind};
}

Access async_access(Warp *w, uint32_t a, uint32_t clock, access_kind_t kind) {
    return (Access){a, clock, pc_of(w), ASYNC, kind};
}
