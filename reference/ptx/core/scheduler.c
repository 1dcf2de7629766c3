/* The scheduler: which warp moves next, which of its lanes, and when nothing can move any more.

   Schedules: 0 round robin; 1 random turns of random length; 2 + k: warp k (of every CTA) moves only when no other can.
   A warp's lanes stand in fragments; the fragment at the lowest instruction goes first, and fragments that meet are joined. */
#include "machine.h"
#include <stdio.h>
#include <stdlib.h>

static uint64_t next_random(Machine *m) {
    uint64_t x = m->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return m->random = x;
}

/* ---- fragments ---- */
static void join_fragments(Warp *w) {
    for (int i = 0; i < w->n_fragments; i++)
        for (int k = i + 1; k < w->n_fragments;)
            if (w->fragments[k].pc == w->fragments[i].pc && !w->fragments[k].arrived && !w->fragments[i].arrived) {
                w->fragments[i].lanes |= w->fragments[k].lanes;
                w->fragments[i].blocked = 0;
                w->fragments[k] = w->fragments[--w->n_fragments];
            } else k++;
}

static int pick_fragment(Warp *w) {
    int best = -1, rotate = w->n_fragments > 1 && (w->steps >> 14 & 1);      /* now and then the highest, lest a spinning one starve it */
    for (int i = 0; i < w->n_fragments; i++) {
        if (w->fragments[i].blocked) continue;
        if (best < 0 || (rotate ? w->fragments[i].pc > w->fragments[best].pc : w->fragments[i].pc < w->fragments[best].pc)) best = i;
    }
    return best;
}

OP(branch) {                     /* target */
    (void)m;
    Fragment *f = &w->fragments[w->current];
    lanes_t stay = f->lanes & ~on;
    if (!stay) {
        f->pc = a[0];
        return JUMP;
    }
    int i = w->n_fragments++;
    w->fragments[i] = (Fragment){.lanes = on, .pc = a[0], .waits_since = -1};
    f->lanes = stay;
    return NEXT;
}

OP(branch_indexed) {             /* index, targets, the targets */
    (void)m;
    Fragment *f = &w->fragments[w->current];
    lanes_t rest = on;
    while (rest) {
        uint32_t index = u32(w, a[0])[first_lane(rest)];
        if (index >= (uint32_t)a[1]) fault(m, "branch", on, "brx.idx: index %u of %d targets", index, a[1]);
        lanes_t same = 0;
        EACH if (rest >> l & 1 && u32(w, a[0])[l] == index) same |= 1u << l;
        rest &= ~same;
        if (!rest && f->lanes == same) {
            f->pc = a[2 + index];
            return JUMP;
        }
        w->fragments[w->n_fragments++] = (Fragment){.lanes = same, .pc = a[2 + index], .waits_since = -1};
        f->lanes &= ~same;
        if (!f->lanes) {
            *f = w->fragments[--w->n_fragments];
            return JUMP;
        }
    }
    return NEXT;
}

static void check_exit(Machine *m, Warp *w) {
    if (!m->strict || w->live) return;
    if (w->bulk.open) finding(m, "left behind", -1, 0, "the warp ends with bulk copies that it never committed to a group");
    else if (w->bulk.committed > w->clock.done[agent(w, AGENT_BULK)])
        finding(m, "left behind", -1, 0, "the warp ends while its bulk copies may still read shared memory: no cp.async.bulk.wait_group covers them");
    if (w->wgmma.committed > w->wgmma.waited || w->wgmma.open) finding(m, "left behind", -1, 0, "the warp ends with wgmma operations that it never waited for");
}

OP(refuse) { (void)a; fault(m, "not implemented", on, "not implemented"); }

OP(exit) {
    (void)a;
    Fragment *f = &w->fragments[w->current];
    w->live &= ~on;
    check_exit(m, w);
    m->progress++;
    f->lanes &= ~on;
    if (f->lanes) return NEXT;
    *f = w->fragments[--w->n_fragments];
    if (!w->live) barrier_recheck(m, w->cta);
    return JUMP;
}

/* ---- registers that an asynchronous instruction still uses ---- */
static void check_registers(Machine *m, Warp *w, const Insn *i) {
    for (int k = 0; k < i->n_registers; k++) {
        uint32_t use = w->busy[i->registers[k]];
        if (!use) continue;
        if (use >> 31) {
            if (i->flags & MOVES && k >= i->n_written) {         /* the compiler moves registers before the wait: the copy is as unready as its source */
                for (int d = 0; d < i->n_written; d++) {
                    if (!w->busy[i->registers[d]]) w->busy_registers++;
                    w->busy[i->registers[d]] = use;
                }
                continue;
            }
            if (i->flags & MOVES) continue;
            finding(m, "register in use", (int32_t)(use & 0x7fffffff), 0, "uses a register that a tcgen05.ld fills, before tcgen05.wait::ld");
        } else if (!(i->flags & CHAINS)) {
            finding(m, "register in use", -1, 0, "%s a register of a wgmma in flight (group %u), before wgmma.wait_group", k < i->n_written ? "writes" : "reads", use);
        }
        return;
    }
}

/* ---- one turn of a warp ---- */
/* Returns how many instructions it executed. */
static uint64_t turn(Machine *m, Warp *w, uint64_t quantum) {
    uint64_t n = 0;
    uint64_t *executed = m->executed + (size_t)w->index * (size_t)m->n_code;
    for (int i = 0; i < w->n_fragments; i++) w->fragments[i].blocked = 0;
    m->running = w;
    while (n < quantum && w->live) {
        int k = w->n_fragments == 1 ? (w->fragments[0].blocked ? -1 : 0) : pick_fragment(w);
        if (k < 0) break;
        w->current = k;
        Fragment *f = &w->fragments[k];
        const Insn *i = &m->code[f->pc];
        lanes_t on = f->lanes;
        if (i->flags & CONVERGENT && f->lanes != w->live) {
            f->blocked = 1;
            waiting(w, "the other lanes of its warp (%08x) at an .aligned instruction", w->live & ~f->lanes);
            continue;
        }
        if (i->guard >= 0) on &= predicate(w, i->guard);
        status_t s = NEXT;
        if (on) {
            if (w->busy_registers && m->strict) check_registers(m, w, i);
            w->on = on;
            s = i->execute(m, w, i->args, on);
        }
        if (s == BLOCK) {
            w->fragments[k].blocked = 1;
            continue;
        }
        if (on) executed[i - m->code]++;
        w->steps++, n++;
        for (int r = 0; r < i->n_written; r++) w->stamp[i->registers[r]] = (uint32_t)w->steps;
        if (s == NEXT) w->fragments[k].pc++;
        if (w->n_fragments > 1) join_fragments(w);
    }
    m->counts[COUNT_INSTRUCTIONS] += n;
    return n;
}

/* ---- a cluster's life ---- */
static void start_cta(Machine *m, Cta *c, uint32_t rank, const uint32_t origin[3]) {
    uint32_t x = rank % m->cluster[0], y = rank / m->cluster[0] % m->cluster[1], z = rank / (m->cluster[0] * m->cluster[1]);
    uint32_t threads = m->block[0] * m->block[1] * m->block[2];
    memset(c, 0, sizeof *c);
    c->m = m, c->rank = rank;
    c->id[0] = origin[0] + x, c->id[1] = origin[1] + y, c->id[2] = origin[2] + z;
    c->index = c->id[0] + m->grid[0] * (c->id[1] + m->grid[1] * c->id[2]);
    c->shared = aligned_alloc(1024, SHARED_BYTES);
    memset(c->shared, 0xff, SHARED_BYTES);       /* NaNs: what nothing wrote must not look like data */
    c->shared_history = calloc(SHARED_BYTES / 2, sizeof(uint32_t));
    c->lane_history = calloc(SHARED_BYTES / 2, sizeof(LaneTouch));
    c->mbarrier_at = calloc(SHARED_BYTES / 8, 1);
    c->tile_swizzle = calloc(SHARED_BYTES / 16, 1);
    if (m->sm100) {
        c->tmem = malloc(TMEM_LANES * TMEM_COLUMNS * sizeof(uint32_t));
        memset(c->tmem, 0xff, TMEM_LANES * TMEM_COLUMNS * sizeof(uint32_t));
        c->tmem_history = calloc(TMEM_LANES * TMEM_COLUMNS, sizeof(uint32_t));
    }
    for (int i = 0; i < 16; i++) c->named[i] = (Barrier){0, 0, 0, clock_new(m), clock_new(m)};
    if (rank && m->n_relocations) {
        c->constants = aligned_alloc(64, m->constant_bytes);
        memcpy(c->constants, m->constants, m->constant_bytes);
        for (int i = 0; i < m->n_relocations; i++)
            EACH {
                uint8_t *at = c->constants + (m->relocations[i] >> 1);
                if (m->relocations[i] & 1) ((uint64_t *)at)[l] += (uint64_t)rank << 24;
                else ((uint32_t *)at)[l] += rank << 24;
            }
    }
    c->n_warps = (int)((threads + WARP - 1) / WARP);
    c->warps = calloc((size_t)c->n_warps, sizeof(Warp));
    for (int i = 0; i < c->n_warps; i++) {
        Warp *w = &c->warps[i];
        uint32_t lanes = threads - (uint32_t)i * WARP;
        w->cta = c, w->index = i;
        w->live = lanes >= WARP ? ALL_LANES : (1u << lanes) - 1;
        w->fragments[0] = (Fragment){.lanes = w->live, .waits_since = -1};
        w->n_fragments = 1;
        w->registers = aligned_alloc(64, (size_t)m->register_bytes + 64);
        memset(w->registers, 0xff, (size_t)m->register_bytes);
        w->local = malloc((size_t)m->local_bytes * WARP + 1);
        w->constants = c->constants ? c->constants : m->constants;
        w->clock = clock_new(m);
        w->base = clock_new(m);
        w->clock.done[agent(w, AGENT_WARP)] = 1;
        if (m->sm100) w->tcgen_after = calloc(m->agents, sizeof(uint32_t));
        w->busy = calloc((size_t)m->n_registers + 1, sizeof(uint32_t));
        w->stamp = calloc((size_t)m->n_registers + 1, sizeof(uint32_t));
    }
}

static void end_cta(Cta *c) {
    for (int i = 0; i < c->n_warps; i++) {
        Warp *w = &c->warps[i];
        free(w->registers), free(w->local), free(w->busy), free(w->stamp), free(w->tcgen_after), clock_free(w->clock), clock_free(w->base);
    }
    for (int i = 0; i < 16; i++) clock_free(c->named[i].arriving), clock_free(c->named[i].completed);
    for (int i = 0; i < c->n_mbarriers; i++) clock_free(c->mbarriers[i].arriving), clock_free(c->mbarriers[i].completed);
    free(c->constants), free(c->warps), free(c->shared), free(c->shared_history), free(c->lane_history), free(c->mbarrier_at), free(c->tile_swizzle), free(c->tmem), free(c->tmem_history);
}

static int any_live(const Machine *m) {
    for (int i = 0; i < m->n_ctas; i++)
        for (int k = 0; k < m->ctas[i].n_warps; k++) if (m->ctas[i].warps[k].live) return 1;
    return 0;
}

static void deadlock(Machine *m, const char *what) {
    for (int i = 0; i < m->n_ctas; i++)
        for (int k = 0; k < m->ctas[i].n_warps; k++) {
            Warp *w = &m->ctas[i].warps[k];
            for (w->current = 0; w->current < w->n_fragments && w->live; w->current++) {
                Fragment *f = &w->fragments[w->current];
                m->running = w;
                if (f->blocked) finding(m, what, -2 - k, f->lanes, "warp %d of CTA %u (lanes %08x) waits for %s", k, w->cta->index, f->lanes, f->why);
                else finding(m, what, -2 - k, f->lanes, "warp %d of CTA %u (lanes %08x) spins", k, w->cta->index, f->lanes);
            }
        }
    m->faulted = 1;
    longjmp(m->stop, 1);
}

static void run_cluster(Machine *m) {
    int total = m->n_ctas * m->ctas[0].n_warps, warps = m->ctas[0].n_warps, quiet_ticks = 0;
    uint64_t progress = m->progress, idle_steps = 0;
    while (any_live(m)) {
        uint64_t moved = 0;
        int late = m->schedule >= 2 ? (m->schedule - 2) % warps : -1;
        for (int i = 0; i < total; i++) {
            int k = m->schedule == 1 ? (int)(next_random(m) % (uint64_t)total) : i;
            Warp *w = &m->ctas[k / warps].warps[k % warps];
            if (!w->live || w->index == late) continue;
            moved += turn(m, w, m->schedule == 1 ? 1 + next_random(m) % 24 : m->schedule == 0 ? 32 : 256);
        }
        if (!moved) {                                        /* random turns may have missed someone; the late warp may now move */
            for (int i = 0; i < total; i++) {
                Warp *w = &m->ctas[i / warps].warps[i % warps];
                if (w->live) moved += turn(m, w, m->schedule >= 2 ? 1 : 32);
                if (moved && m->schedule >= 2) break;
            }
        }
        idle_steps += moved;
        if (m->progress != progress) progress = m->progress, quiet_ticks = 0, idle_steps = 0;
        else if (!moved) {
            if (quiet_ticks++ == 3) deadlock(m, "deadlock");
            m->tick++;                                       /* time passes: each try_wait gives up once */
        } else if (idle_steps > m->step_limit) deadlock(m, "no progress");
    }
}

uint64_t machine_bytes(void) { return sizeof(Machine); }

int run(Machine *m) {
    uint32_t size = m->cluster[0] * m->cluster[1] * m->cluster[2], origin[3];
    m->n_ctas = (int)size;
    m->agents = size * AGENTS;
    m->clock_words = m->agents * (m->sm100 ? 4 : 3);
    history_start();
    m->ctas = calloc(size, sizeof(Cta));
    m->random = m->seed * 2 + 0x9e3779b97f4a7c15ull;
    for (origin[2] = 0; origin[2] < m->grid[2]; origin[2] += m->cluster[2])
        for (origin[1] = 0; origin[1] < m->grid[1]; origin[1] += m->cluster[1])
            for (origin[0] = 0; origin[0] < m->grid[0]; origin[0] += m->cluster[0]) {
                history_reset();
                m->cluster_barrier = (Barrier){0, 0, 0, clock_new(m), clock_new(m)};
                for (uint32_t r = 0; r < size; r++) start_cta(m, &m->ctas[r], r, origin);
                if (!setjmp(m->stop)) {
                    run_cluster(m);
                    m->running = NULL;
                    for (uint32_t r = 0; r < size && m->strict; r++) {
                        tmem_check_end(m, &m->ctas[r]);
                        mbarrier_check_end(m, &m->ctas[r]);
                    }
                }
                for (uint32_t r = 0; r < size; r++) end_cta(&m->ctas[r]);
                clock_free(m->cluster_barrier.arriving), clock_free(m->cluster_barrier.completed);
                if (m->faulted) goto done;
            }
done:
    free(m->ctas);
    return m->n_findings;
}
