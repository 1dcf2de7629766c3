/* Named barriers of a CTA, the cluster's barrier, and fences. */
#include "machine.h"

static uint32_t live_threads(const Cta *c) {
    uint32_t n = 0;
    for (int i = 0; i < c->n_warps; i++) n += c->warps[i].live ? WARP : 0;
    return n;
}

static int complete_if_due(Machine *m, Barrier *b, uint32_t all) {
    uint32_t expected = b->expected ? b->expected : all;
    if (!b->arrived || b->arrived < expected) return 0;
    b->generation++;
    b->arrived = b->expected = 0;
    clock_join(m, b->completed, b->arriving);
    clock_clear(m, b->arriving);
    m->progress++;
    return 1;
}

static uint32_t cluster_threads(const Machine *m) {
    uint32_t n = 0;
    for (int i = 0; i < m->n_ctas; i++) n += live_threads(&m->ctas[i]);
    return n;
}

void barrier_recheck(Machine *m, Cta *c) {
    for (int i = 0; i < 16; i++) if (c->named[i].arrived && !c->named[i].expected) complete_if_due(m, &c->named[i], live_threads(c));
    if (m->cluster_barrier.arrived) complete_if_due(m, &m->cluster_barrier, cluster_threads(m));
}

/* a = barrier, threads or -1 (all of the CTA), arrive only, aligned */
OP(barrier) {
    uint32_t id = u32(w, a[0])[first_lane(on)], threads = a[1] == -1 ? 0 : u32(w, a[1])[first_lane(on)];
    Fragment *f = &w->fragments[w->current];
    if (id > 15) fault(m, "barrier", on, "barrier %u; there are 16", id);
    Barrier *b = &w->cta->named[id];
    if (!f->arrived) {
        if (threads % WARP) fault(m, "barrier", on, "barrier %u with %u threads, not a multiple of 32", id, threads);
        if (b->arrived && b->expected != threads)
            fault(m, "barrier", on, "barrier %u with %u threads, while others wait for it with %u (0: all)", id, threads, b->expected);
        b->expected = threads;
        b->arrived += a[3] ? WARP : (uint32_t)__builtin_popcount(on);
        if (threads && b->arrived > threads) fault(m, "barrier", on, "barrier %u: %u threads arrive where %u were expected", id, b->arrived, threads);
        m->counts[COUNT_BARRIERS]++;
        m->progress++;
        release(m, w, b->arriving);
        f->generation = b->generation;
        complete_if_due(m, b, live_threads(w->cta));
        if (a[2]) return NEXT;
        f->arrived = 1;
    }
    if (b->generation == f->generation) {
        waiting(w, "barrier %u (%u of %u threads have arrived)", id, b->arrived, b->expected ? b->expected : live_threads(w->cta));
        return BLOCK;
    }
    f->arrived = 0;
    lanes_meet(w);
    acquire(m, w, b->completed);
    return NEXT;
}

/* A relaxed arrival says nothing about memory but what a fence before it covers: mbarriers that fence.mbarrier_init has made known, or
   all that came before a fence of the cluster. */
static void release_relaxed(Machine *m, Warp *w, Barrier *b) {
    for (int i = 0; i < w->cta->n_mbarriers; i++) {
        Mbarrier *x = &w->cta->mbarriers[i];
        if (x->fenced && !x->published && x->init_agent == agent(w, AGENT_WARP)) x->published = b->generation + 1;
    }
    if (!w->fence_clock) return;
    uint32_t *own = &w->clock.done[agent(w, AGENT_WARP)], now = *own;
    *own = w->fence_clock;
    clock_join(m, b->arriving, w->clock);
    *own = now;
}

OP(fence) {
    (void)m, (void)a, (void)on;
    w->fence_clock = w->clock.done[agent(w, AGENT_WARP)]++;
    return NEXT;
}

OP(cluster_arrive) {             /* a = relaxed */
    if (w->cluster_arrived) fault(m, "barrier", on, "barrier.cluster.arrive twice with no wait between");
    Barrier *b = &m->cluster_barrier;
    w->cluster_arrived = 1;
    w->cluster_generation = b->generation;
    b->arrived += WARP;
    if (a[0]) release_relaxed(m, w, b);
    else release(m, w, b->arriving);
    m->counts[COUNT_BARRIERS]++;
    m->progress++;
    complete_if_due(m, b, cluster_threads(m));
    return NEXT;
}

OP(cluster_wait) {
    (void)a;
    Barrier *b = &m->cluster_barrier;
    if (!w->cluster_arrived) fault(m, "barrier", on, "barrier.cluster.wait without an arrive");
    if (b->generation == w->cluster_generation) {
        waiting(w, "the cluster's barrier (%u of %u threads have arrived)", b->arrived, cluster_threads(m));
        return BLOCK;
    }
    w->cluster_arrived = 0;
    w->cluster_generation = b->generation;
    lanes_meet(w);
    acquire(m, w, b->completed);
    return NEXT;
}

OP(grid_wait) {                  /* griddepcontrol.wait: the launch before is done, and what it wrote is visible */
    (void)a, (void)on;
    for (int r = 0; r < m->n_ctas; r++) w->clock.done[(uint32_t)r * AGENTS + AGENT_PREVIOUS_GRID] = 1;
    return NEXT;
}

OP(fence_mbarrier_init) { (void)m, (void)a, (void)on; mbarrier_fence(w, 0); return NEXT; }
OP(fence_proxy_async) {          /* what is known to be done becomes visible to the async proxy: in shared (1), global (2) or both (3) */
    (void)on;
    if (a[0] & 1) mbarrier_fence(w, 1);
    for (int s = 0; s < 2; s++) if (a[0] >> s & 1)
        for (uint32_t i = 0; i < m->agents; i++)
            if (w->clock.fenced[s][i] < w->clock.done[i]) w->clock.fenced[s][i] = w->clock.done[i];
    w->clock.done[agent(w, AGENT_WARP)]++;     /* later stores are not covered */
    return NEXT;
}
