/* mbarriers: phases, pending arrivals and transaction counts.

   A phase completes when no arrivals are pending and the transaction count is zero. Whoever observes a completed phase knows all that the
   arriving warps had done, and that the copies of that phase have landed: the mbarrier is itself an agent whose clock is its phase. */
#include "machine.h"

uint32_t mbarrier_agent(const Mbarrier *b, const Cta *owner) { return owner->rank * AGENTS + AGENT_MBARRIER + (uint32_t)(b - owner->mbarriers); }

Mbarrier *mbarrier_at(Machine *m, Warp *w, uint32_t address, Cta **owner) {
    if (address % 8) fault(m, "misaligned", 0, "an mbarrier at shared address %u", shared_offset(address));
    shared_at(m, w, address, 8, owner);
    uint32_t offset = shared_offset(address), number = (*owner)->mbarrier_at[offset / 8];
    if (!number) fault(m, "mbarrier", 0, "no mbarrier has been initialised at shared address %u of CTA rank %u", offset, (*owner)->rank);
    Mbarrier *b = &(*owner)->mbarriers[number - 1];
    if (m->strict && b->init_agent != agent(w, AGENT_WARP) && w->clock.done[b->init_agent] < b->init_clock && !(b->published && w->cluster_generation >= b->published))
        finding(m, "race", b->init_pc, 0, "uses the mbarrier at shared address %u of CTA rank %u with nothing that orders this after its initialisation",
                offset, (*owner)->rank);
    return b;
}

static void complete_if_due(Machine *m, Mbarrier *b, Cta *owner) {
    if (b->pending || b->tx) return;
    b->phase++;
    b->pending = (int32_t)b->count;
    clock_join(m, b->completed, b->arriving);
    clock_clear(m, b->arriving);
    b->completed.done[mbarrier_agent(b, owner)] = b->phase;
    m->progress++;
}

void mbarrier_for_async(Machine *m, const Mbarrier *b, const Cta *owner) {
    if (m->strict && !b->fenced)
        finding(m, "missing mbarrier fence", b->init_pc, 0,
                "the async proxy uses the mbarrier at shared address %u of CTA rank %u: no fence.mbarrier_init or fence.proxy.async follows its initialisation",
                b->address, owner->rank);
}

void mbarrier_fence(Warp *w, int others) {
    for (int i = 0; i < w->cta->n_mbarriers; i++) {
        Mbarrier *b = &w->cta->mbarriers[i];
        b->fenced |= b->init_agent == agent(w, AGENT_WARP) || (others && w->clock.done[b->init_agent] >= b->init_clock);
    }
}

void mbarrier_arrive(Machine *m, Mbarrier *b, Cta *owner, uint32_t count) {
    if ((int64_t)count > b->pending)
        fault(m, "mbarrier", 0, "%u arrivals at the mbarrier at shared address %u of CTA rank %u, which waits for %d more in this phase (%u in all)", count,
              b->address, owner->rank, b->pending, b->count);
    b->pending -= (int32_t)count;
    m->progress++;
    complete_if_due(m, b, owner);
}

void mbarrier_transaction(Machine *m, Mbarrier *b, Cta *owner, int64_t bytes) {
    b->tx += bytes;
    if (bytes < 0) b->copy_phase = b->phase + 1, b->copy_pc = pc_of(m->running);
    if (b->tx > (1 << 20) - 1 || b->tx < -((1 << 20) - 1))
        fault(m, "mbarrier", 0, "transaction count %lld of the mbarrier at shared address %u is out of range", (long long)b->tx, b->address);
    m->progress++;
    complete_if_due(m, b, owner);
}

/* A copy that nobody waited for may land after the CTA's end, in shared memory that is another's by then. */
void mbarrier_check_end(Machine *m, Cta *c) {
    for (int i = 0; i < c->n_mbarriers; i++) {
        Mbarrier *b = &c->mbarriers[i];
        int seen = !b->copy_phase;
        for (int r = 0; r < m->n_ctas && !seen; r++)
            for (int k = 0; k < m->ctas[r].n_warps; k++) seen |= m->ctas[r].warps[k].clock.done[mbarrier_agent(b, c)] >= b->copy_phase;
        if (!seen)
            finding(m, "left behind", b->copy_pc, 0, "CTA %u ends and no warp has waited for the last copy on the mbarrier at shared address %u (phase %u)",
                    c->index, b->address, b->copy_phase);
    }
}

OP(mbarrier_init) {              /* address (3), count */
    EACH if (ON(l)) {
        uint32_t address = (uint32_t)effective_address(w, a, l), offset = shared_offset(address), count = u32(w, a[3])[l];
        Cta *c;
        uint8_t *p = shared_at(m, w, address, 8, &c);
        if (offset % 8) fault(m, "misaligned", 1u << l, "mbarrier.init at shared address %u", offset);
        if (!count || count > (1 << 20) - 1) fault(m, "mbarrier", 1u << l, "mbarrier.init with count %u", count);
        if (c != w->cta) fault(m, "mbarrier", 1u << l, "mbarrier.init in another CTA's shared memory");
        if (c->mbarrier_at[offset / 8])
            finding(m, "mbarrier", c->mbarriers[c->mbarrier_at[offset / 8] - 1].init_pc, 1u << l, "initialises a live mbarrier at shared address %u again", offset);
        if (c->n_mbarriers == MAX_MBARRIERS) fault(m, "not implemented", 1u << l, "more than %d mbarriers in a CTA", MAX_MBARRIERS);
        c->mbarrier_at[offset / 8] = (uint8_t)(c->n_mbarriers + 1);
        Mbarrier *b = &c->mbarriers[c->n_mbarriers++];
        *b = (Mbarrier){offset, count, 0, (int32_t)count, 1, pc_of(w), 0, agent(w, AGENT_WARP),
                         w->clock.done[agent(w, AGENT_WARP)], 0, -1, clock_new(m), clock_new(m)};
        touch_shared(m, w, c, offset, 8, own_access(w, WRITE));
        memset(p, 0, 8);
    }
    m->progress++;
    return NEXT;
}

OP(mbarrier_inval) {
    EACH if (ON(l)) {
        Cta *c;
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a, l), &c);
        b->live = 0;
        c->mbarrier_at[b->address / 8] = 0;
    }
    return NEXT;
}

/* a = state register or -1, address (3), count operand, transaction operand or -1, drop */
OP(mbarrier_arrive) {
    EACH if (ON(l)) {
        Cta *c;
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a + 1, l), &c);
        if (a[0] >= 0) ((uint64_t *)(w->registers + a[0]))[l] = b->phase;
        clock_join(m, b->arriving, w->clock);
        if (a[5] != -1) b->tx += u32(w, a[5])[l];
        uint32_t count = u32(w, a[4])[l];
        if (a[6]) b->count -= count;
        mbarrier_arrive(m, b, c, count);
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    m->counts[COUNT_BARRIERS]++;
    return NEXT;
}

OP(mbarrier_tx) {                /* address (3), bytes, sign: expect_tx (1) and complete_tx (-1) */
    EACH if (ON(l)) {
        Cta *c;
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a, l), &c);
        mbarrier_transaction(m, b, c, (int64_t)u32(w, a[3])[l] * a[4]);
    }
    return NEXT;
}

OP(cpasync_arrive) {             /* address (3), noinc: arrives when the thread's cp.async so far are done */
    uint32_t unit = agent(w, AGENT_CPASYNC), before = w->clock.done[unit];
    EACH if (ON(l)) {
        Cta *c;
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a, l), &c);
        w->clock.done[unit] = w->cpasync.committed + 1;
        clock_join(m, b->arriving, w->clock);
        w->clock.done[unit] = before;
        if (!a[3]) b->pending++;
        mbarrier_arrive(m, b, c, 1);
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    w->cpasync.committed++;      /* later copies are not covered by this arrival */
    return NEXT;
}

/* a = destination (3), mbarrier (3), bytes of an element, elements, the elements: st.async */
OP(st_async) {
    uint32_t size = (uint32_t)a[6], n = (uint32_t)a[7];
    EACH if (ON(l)) {
        Cta *c, *owner;
        uint32_t to = (uint32_t)effective_address(w, a, l);
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a + 3, l), &c);
        uint8_t *p = shared_at(m, w, to, size * n, &owner);
        if (to % (size * n)) fault(m, "misaligned", 1u << l, "st.async of %u bytes to shared address %u", size * n, shared_offset(to));
        Access x = async_access(w, mbarrier_agent(b, c), b->phase + 1, WRITE);
        x.proxy = GENERIC;
        touch_shared(m, w, owner, shared_offset(to), size * n, x);
        for (uint32_t i = 0; i < n; i++) memcpy(p + i * size, size == 8 ? (const void *)&u64(w, a[8 + i])[l] : (const void *)&u32(w, a[8 + i])[l], size);
        clock_join(m, b->arriving, w->clock);
        mbarrier_transaction(m, b, c, -(int64_t)(size * n));
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    return NEXT;
}

/* a = predicate, address (3), parity or state operand, whether it is a parity, whether it may wait.
   try_wait waits until the phase completes or a time limit passes; here the limit passes when nothing else can move. */
OP(mbarrier_wait) {
    lanes_t done = 0;
    Mbarrier *last = NULL;
    Cta *c = NULL;
    uint32_t wanted = 0;
    EACH if (ON(l)) {
        Mbarrier *b = mbarrier_at(m, w, (uint32_t)effective_address(w, a + 1, l), &c);
        int complete = a[5] ? ((b->phase ^ u32(w, a[4])[l]) & 1) : b->phase > u64(w, a[4])[l];
        if (complete) {
            done |= 1u << l;
            if (b != last) {
                acquire(m, w, b->completed);
                if (b->completed.done[agent(w, AGENT_WARP)] >= w->touch_clock) lanes_meet(w);    /* each has arrived since it used memory */
            }
        } else wanted = a[5] ? u32(w, a[4])[l] & 1 : (uint32_t)u64(w, a[4])[l];
        last = b;
    }
    Fragment *f = &w->fragments[w->current];
    if (a[6] && !done) {
        waiting(w, "phase of parity %u of the mbarrier at shared address %u of CTA rank %u (completed phases %u, pending arrivals %d of %u, pending bytes %lld)",
                wanted, last->address, c->rank, last->phase, last->pending, last->count, (long long)last->tx);
        if (f->waits_since < 0) f->waits_since = (int64_t)m->tick;
        if (f->waits_since == (int64_t)m->tick) return BLOCK;
    }
    f->waits_since = -1;
    set_predicate(w, a[0], done, on);
    return NEXT;
}
