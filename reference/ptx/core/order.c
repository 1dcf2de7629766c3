/* Order: which accesses to memory are certain to come after which, whatever the schedule.

   Every agent (a warp; an asynchronous unit, see machine.h) has a clock. A warp's vector clock `done[agent]` says up to which clock
   value the agent's accesses are known to precede what the warp does next; barriers and waits join vector clocks. Two more vectors,
   `fenced`, say which of those accesses a proxy fence has since made visible to the async proxy (TMA, wgmma, tcgen05), in shared and in
   global memory: the fence may stand anywhere on the path from the write to the asynchronous read, as in PTX's memory model.
   Tensor memory is ordered between threads only where the one fences before they meet (`covered`) and the other after (`tcgen_after`).

   Every cell of shared, tensor and global memory carries the number of a history: its last write and the reads since then. Histories are
   immutable and shared, so that a tile that one instruction wrote costs one record, and a check over many cells with one history
   is made once. History 0 is memory that nothing ever wrote. */
#include "machine.h"
#include <stdio.h>
#include <stdlib.h>

Clock clock_new(Machine *m) {
    uint32_t *memory = calloc(m->clock_words, sizeof(uint32_t)), n = m->agents;
    return (Clock){memory, {memory + n, memory + 2 * n}, m->sm100 ? memory + 3 * n : NULL};
}

void clock_free(Clock c) { free(c.done); }

static void join(uint32_t *restrict into, const uint32_t *restrict from, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

void clock_join(Machine *m, Clock into, Clock from) {
    join(into.done, from.done, m->clock_words);        /* the others lie behind `done` */
}

void clock_clear(Machine *m, Clock c) { memset(c.done, 0, m->clock_words * sizeof(uint32_t)); }

void release(Machine *m, Warp *w, Clock into) {
    clock_join(m, into, w->clock);
    w->clock.done[agent(w, AGENT_WARP)]++;
}

static int covers(const Machine *m, Clock a, Clock b) {
    for (uint32_t i = 0; i < m->clock_words; i++) if (a.done[i] < b.done[i]) return 0;
    return 1;
}

void acquire(Machine *m, Warp *w, Clock from) {
    if (w->live & ~w->on) {
        if (!w->split) {
            clock_clear(m, w->base), clock_join(m, w->base, w->clock);
            w->acquired = w->on;
        } else if (!(w->acquired & w->on) && (w->acquired | w->on) == w->live && covers(m, w->clock, from)) {
            clock_join(m, w->base, from);              /* the others catch up */
        } else w->acquired &= w->on;
        w->split = 1;
    } else if (w->split) clock_join(m, w->base, from);
    clock_join(m, w->clock, from);
}

/* Whether the executing lanes know that the agent's accesses up to this clock are done. What the warp's own units do, all its lanes wait
   for together, but for tcgen05 operations, which tell an mbarrier. */
static int known(const Warp *w, uint32_t a, uint32_t clock) {
    uint32_t kind = a % AGENTS, own = kind < AGENT_MBARRIER && a == agent(w, (int)(kind - kind % MAX_WARPS)) && (kind < AGENT_TCGEN || kind >= AGENT_CPASYNC);
    int base = w->split && w->on & ~w->acquired && !own;
    return (base ? w->base.done : w->clock.done)[a] >= clock;
}

typedef struct {
    Access write;                /* agent == NOBODY: never written */
    uint32_t n_reads;
    Access *reads;
} History;

enum { NOBODY = 0xffffffff };
static History *histories;
static const History never = {{NOBODY, 0, -1, GENERIC, WRITE}, 0, NULL};
static uint32_t first_history, n_histories, capacity;    /* numbers begin at first_history: lower ones are of clusters that have ended */

static const History *history_of(uint32_t number) { return number < first_history ? &never : &histories[number - first_history]; }

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

void history_start(void) { first_history = 1, n_histories = 0; }

void history_reset(void) {
    if (!steps) steps = malloc(STEPS * sizeof *steps);
    memset(steps, 0xff, STEPS * sizeof *steps);
    while (blocks) {
        struct Block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
    if (!histories) histories = malloc((capacity = 4096) * sizeof *histories);
    first_history += n_histories;
    n_histories = 0;
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
    return first_history + n_histories++;
}

static int in_order_unit(uint32_t a) {   /* tcgen05 operations of one thread run in the order of their issue */
    a %= AGENTS;
    return (a >= AGENT_TCGEN && a < AGENT_TCGEN + MAX_WARPS) || a < MAX_WARPS;
}

static int precedes(const Access *old, const Warp *issuer, const Access *new) {
    if (old->agent == new->agent && in_order_unit(old->agent)) return 1;
    if (known(issuer, old->agent, old->clock)) return 1;
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

typedef struct { const char *name; uint64_t address; int global; } Place;   /* for messages: "shared address", 1234 */

static void conflict(Machine *m, const Access *old, const Access *new, Place at) {
    uint32_t rank = old->agent / AGENTS, k = old->agent % AGENTS;
    if (k < AGENT_MBARRIER)
        finding(m, "race", old->pc, 0, "%s at %s %llu is not ordered after %s by warp %u of CTA rank %u", name_of(new), at.name,
                (unsigned long long)at.address, name_of(old), k % MAX_WARPS, rank);
    else
        finding(m, "race", old->pc, 0, "%s at %s %llu is not ordered after %s (phase %u of mbarrier %u of CTA rank %u)", name_of(new),
                at.name, (unsigned long long)at.address, name_of(old), old->clock, k - AGENT_MBARRIER, rank);
}

/* What another thread's tcgen05 operation did, and what the tensor core did for anyone, is ordered before a tcgen05 operation of this
   thread by fence::before_thread_sync (which a commit implies), a synchronisation, and fence::after_thread_sync. */
static int is_tcgen(uint32_t a) {
    a %= AGENTS;
    return (a >= AGENT_TCGEN && a < AGENT_CPASYNC) || (a >= AGENT_TMEM_LD && a < AGENT_MBARRIER);
}

static int unfenced_tcgen(const Warp *issuer, const Access *old, const Access *new) {
    if (!issuer->tcgen_after || !is_tcgen(old->agent) || !is_tcgen(new->agent) || old->agent == new->agent) return 0;
    if (old->agent == agent(issuer, AGENT_TMEM_LD) || old->agent == agent(issuer, AGENT_TMEM_ST)) return 0;
    return issuer->tcgen_after[old->agent] < old->clock;
}

static void missing_tcgen_fence(Machine *m, const Warp *issuer, const Access *old, const Access *new, Place at) {
    finding(m, "missing tcgen05.fence", old->pc, 0, "%s at %s %llu follows %s of another thread with no tcgen05.fence::%s", name_of(new), at.name,
            (unsigned long long)at.address, name_of(old),
            issuer->clock.covered[old->agent] < old->clock ? "before_thread_sync after that" : "after_thread_sync since they met");
}

static void check(Machine *m, Warp *issuer, const History *h, const Access *new, Place at) {
    const Access *old = &h->write;
    if (old->agent == NOBODY) {
        if (new->kind != WRITE && !at.global)
            finding(m, "uninitialised", -1, 0, "%s reads %s %llu, which nothing has written", name_of(new), at.name, (unsigned long long)at.address);
    } else if (!precedes(old, issuer, new)) {
        conflict(m, old, new, at);
    } else if (old->proxy == GENERIC && new->proxy == ASYNC && issuer->clock.fenced[at.global][old->agent] < old->clock) {
        finding(m, "missing proxy fence", old->pc, 0, "%s at %s %llu follows a generic store with no fence.proxy.async%s between them",
                name_of(new), at.name, (unsigned long long)at.address, at.global ? " that covers global memory" : "");
    } else if (unfenced_tcgen(issuer, old, new)) {
        missing_tcgen_fence(m, issuer, old, new, at);
    }
    for (uint32_t i = 0; i < h->n_reads; i++) {
        old = &h->reads[i];
        if (new->kind == READ && old->kind == READ) continue;
        if (new->kind == ATOMIC && old->kind == ATOMIC) continue;
        if (!precedes(old, issuer, new)) conflict(m, old, new, at);
        else if (unfenced_tcgen(issuer, old, new)) missing_tcgen_fence(m, issuer, old, new, at);
    }
}

static uint32_t step(Machine *m, Warp *issuer, uint32_t from, const Access *a, Place at) {
    uint32_t hash = (from * 0x9e3779b1u ^ a->agent * 0x85ebca6bu ^ a->clock * 0xc2b2ae35u ^ (uint32_t)a->pc * 0x27d4eb2fu ^ a->kind);
    Step *s = &steps[(hash ^ hash >> 15) & (STEPS - 1)];
    if (m->strict) check(m, issuer, history_of(from), a, at);
    if (s->from == from && s->agent == a->agent && s->clock == a->clock && s->pc == a->pc && s->kind == a->kind) return s->to;
    History old = *history_of(from);
    uint32_t to = a->kind == WRITE ? new_history(*a, NULL, NULL) : new_history(old.write, &old, a);
    *s = (Step){from, a->agent, a->clock, to, a->pc, a->kind};
    return to;
}

/* `count` histories that are `stride` words apart, each of `unit` addresses. */
static void touch(Machine *m, Warp *issuer, uint32_t *history, uint32_t count, uint32_t stride, Access a, Place at, uint32_t unit) {
    uint32_t from = NOBODY, to = NOBODY;
    uint64_t address = at.address;
    for (uint32_t i = 0; i < count; i++, history += stride) {
        if (*history == to && a.kind != WRITE) continue;      /* this access already stands in it */
        if (*history != from) {
            from = *history;
            at.address = address + i * unit;
            to = step(m, issuer, from, &a, at);
        }
        *history = to;
    }
}

void touch_shared(Machine *m, Warp *issuer, Cta *owner, uint32_t offset, uint32_t bytes, Access access) {
    if (!m->strict) return;
    if (access.kind == WRITE && access.proxy == GENERIC) memset(owner->tile_swizzle + offset / 16, 0, (offset % 16 + bytes + 15) / 16);
    touch(m, issuer, owner->shared_history + offset / 2, (offset % 2 + bytes + 1) / 2, 1, access, (Place){"shared address", offset, 0}, 2);
}

void touch_tmem(Machine *m, Warp *issuer, Cta *owner, uint32_t lane, uint32_t column, uint32_t columns, Access access) {
    uint32_t *history = owner->tmem_history + lane * TMEM_COLUMNS + column;
    if (m->strict) touch(m, issuer, history, columns, 1, access, (Place){"tensor memory address", lane << 16 | column, 0}, 1);
}

/* Lanes of one warp: what one stored, another may read (and what one read, another may overwrite) only after they met at a barrier. */
void lanes_meet(Warp *w) {
    if (w->live & ~w->on) return;
    w->sync++;
    w->split = 0;
}

static uint32_t lane_mark(const Warp *w, int lane) { return (w->sync + 1) << 11 | (uint32_t)w->index << 5 | (uint32_t)lane; }

void touch_lane(Machine *m, Warp *w, Cta *owner, uint32_t offset, uint32_t bytes, int lane, access_kind_t kind) {
    if (!m->strict || owner != w->cta || kind == ATOMIC) return;
    uint32_t mine = lane_mark(w, lane), many = 1u << 10;
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

/* ---- global memory ---- */
static uint32_t cluster_of(const Machine *m, uint32_t cta) {
    uint32_t x = cta % m->grid[0] / m->cluster[0], y = cta / m->grid[0] % m->grid[1] / m->cluster[1], z = cta / m->grid[0] / m->grid[1] / m->cluster[2];
    return x + m->grid[0] * (y + m->grid[1] * z);
}

/* CTAs of other clusters: nothing orders them in a launch. Those of one cluster: as in shared memory. */
void touch_global(Machine *m, Warp *w, Allocation *r, uint64_t at, uint32_t bytes, Access access, int lane) {
    static char name[32];
    static int named = -1;
    int tensor = (int)(r - m->allocations), write = access.kind != READ;
    uint32_t n = (uint32_t)(at % 2 + bytes + 1) / 2, me = w->cta->index + 1, mine = cluster_of(m, me - 1), mark = lane < 0 ? 0 : lane_mark(w, lane);
    Cell *cells = r->cells + at / 2;
    if (named != tensor) snprintf(name, sizeof name, "tensor %d, byte", named = tensor);
    for (uint32_t i = 0; i < n && !m->ctas_synchronise; i++) {
        Cell *c = &cells[i];
        uint32_t writer = c->writer & 0x7fffffff;
        unsigned long long byte = at + 2 * i;
        if (writer && writer != me && cluster_of(m, writer - 1) != mine && !(access.kind == ATOMIC && c->writer >> 31))
            finding(m, "race", -1, 0, "%s byte %llu of tensor %d, which CTA %u wrote in the same launch", write ? "writes" : "reads", byte, tensor, writer - 1);
        else if (write && c->reader == SEVERAL)
            finding(m, "race", -1, 0, "writes byte %llu of tensor %d, which several CTAs read in the same launch", byte, tensor);
        else if (write && c->reader && c->reader != me && cluster_of(m, c->reader - 1) != mine)
            finding(m, "race", -1, 0, "writes byte %llu of tensor %d, which CTA %u read in the same launch", byte, tensor, c->reader - 1);
        else if (mark && writer == me && !write && c->lane != mark && (c->lane ^ mark) >> 11 == 0 && ((c->lane ^ mark) >> 5 & 31) == 0)
            finding(m, "race", -1, 1u << lane, "lane %d reads byte %llu of tensor %d after another lane wrote it, with no bar.warp.sync or other barrier between them",
                    lane, byte, tensor);
    }
    if (!m->ctas_synchronise) touch(m, w, &cells->history, n, sizeof(Cell) / sizeof(uint32_t), access, (Place){name, at, 1}, 2);
    for (uint32_t i = 0; i < n; i++) {
        Cell *c = &cells[i];
        if (write) c->writer = me | (access.kind == ATOMIC ? 1u << 31 : 0), c->lane = mark;
        else if (!c->reader) c->reader = me;
        else if (c->reader != me && c->reader != SEVERAL && cluster_of(m, c->reader - 1) != mine) c->reader = SEVERAL;
    }
}

Access own_access(Warp *w, access_kind_t kind) {
    uint32_t a = agent(w, AGENT_WARP);
    return (Access){a, w->clock.done[a], pc_of(w), GENERIC, kind};
}

Access async_access(Warp *w, uint32_t a, uint32_t clock, access_kind_t kind) {
    return (Access){a, clock, pc_of(w), ASYNC, kind};
}
