/* Tensor memory and the fifth-generation tensor core: allocation, ld, st, cp, mma and commit (sm_100a).

   Tensor memory has 128 lanes and 512 columns of 32 bits; an address is lane << 16 | column. */
#include "machine.h"
#include <stdlib.h>

/* ---- allocation ---- */
static void hold(Machine *m, Cta *c, int first, int count, int number) {
    (void)m;
    for (int i = first; i < first + count; i++) c->tmem_owner[i] = (uint16_t)number;
}

static int allocate(Cta *c, int blocks) {            /* the first free run, aligned to its size; -1: none */
    for (int first = 0; first + blocks <= TMEM_COLUMNS / 32; first += blocks) {
        int free_run = 1;
        for (int i = first; i < first + blocks; i++) free_run &= !c->tmem_owner[i];
        if (free_run) return first;
    }
    return -1;
}

OP(tmem_alloc) {                 /* where to write the address (3), columns, CTAs */
    uint32_t columns = u32(w, a[3])[0], to = (uint32_t)effective_address(w, a, 0);
    if (columns < 32 || columns > 512 || columns & (columns - 1)) fault(m, "tensor memory", on, "tcgen05.alloc of %u columns: not a power of two from 32 to 512", columns);
    Cta *c = w->cta;
    if (c->tmem_relinquished) fault(m, "tensor memory", on, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    if (a[4] == 2 && m->n_ctas < 2) fault(m, "tensor memory", on, "cta_group::2 in a cluster of one CTA");
    int first = allocate(c, (int)columns / 32);
    if (first < 0) {
        waiting(w, "%u free columns of tensor memory", columns);
        return BLOCK;
    }
    hold(m, c, first, (int)columns / 32, ++c->tmem_allocations);
    c->tmem_alloc_pc[c->tmem_allocations & 31] = pc_of(w);
    for (int lane = 0; lane < TMEM_LANES && m->strict; lane++)    /* new memory holds nothing */
        memset(c->tmem_history + lane * TMEM_COLUMNS + first * 32, 0, columns * sizeof(uint32_t));
    uint32_t address = (uint32_t)first * 32;
    memcpy(any_at(m, w, 0, SPACE_SHARED, to, 4, WRITE), &address, 4);
    m->progress++;
    return NEXT;
}

OP(tmem_dealloc) {               /* address, columns, CTAs */
    uint32_t address = u32(w, a[0])[0], columns = u32(w, a[1])[0], first = (address & 0xffff) / 32;
    Cta *c = w->cta;
    if (columns < 32 || columns > 512 || first + columns / 32 > TMEM_COLUMNS / 32 || address % 32 || address >> 16)
        fault(m, "tensor memory", on, "tcgen05.dealloc of %u columns at 0x%08x", columns, address);
    int owner = c->tmem_owner[first];
    for (uint32_t i = first; i < first + columns / 32; i++)
        if (!c->tmem_owner[i] || c->tmem_owner[i] != owner)
            fault(m, "tensor memory", on, "tcgen05.dealloc of %u columns at column %u, which %s", columns, address & 0xffff,
                  c->tmem_owner[i] ? "belong to different allocations" : "are not allocated (freed twice?)");
    if ((first && c->tmem_owner[first - 1] == owner) || (first + columns / 32 < TMEM_COLUMNS / 32 && c->tmem_owner[first + columns / 32] == owner))
        fault(m, "tensor memory", on, "tcgen05.dealloc of %u columns: the allocation has more", columns);
    /* nobody may still be using it */
    for (uint32_t lane = 0; lane < TMEM_LANES; lane++) touch_tmem(m, w, c, lane, first * 32, columns, own_access(w, WRITE));
    hold(m, c, (int)first, (int)columns / 32, 0);
    m->progress++;
    return NEXT;
}

OP(tmem_relinquish) { (void)m, (void)a, (void)on; w->cta->tmem_relinquished = 1; return NEXT; }

void tmem_check_end(Machine *m, Cta *c) {
    if (!m->sm100) return;
    for (int i = 0; i < TMEM_COLUMNS / 32; i++)
        if (c->tmem_owner[i]) {
            finding(m, "tensor memory", c->tmem_alloc_pc[c->tmem_owner[i] & 31], 0, "CTA %u ends with tensor memory allocated (column %d)", c->index, i * 32);
            return;
        }
}

/* ---- access ---- */
static uint32_t *tmem_at(Machine *m, Warp *w, Cta *c, uint32_t lane, uint32_t column, uint32_t columns, Access access) {
    if (lane >= TMEM_LANES || column + columns > TMEM_COLUMNS) fault(m, "out of bounds", 0, "tensor memory lane %u, columns %u to %u", lane, column, column + columns);
    for (uint32_t i = column / 32; i <= (column + columns - 1) / 32; i++)
        if (!c->tmem_owner[i]) fault(m, "tensor memory", 0, "uses columns %u to %u, which are not allocated (freed already?)", column, column + columns);
    touch_tmem(m, w, c, lane, column, columns, access);
    return c->tmem + lane * TMEM_COLUMNS + column;
}

/* Which lane and column register r of thread l meets: shapes 32x32b, 16x64b, 16x128b, 16x256b, 16x32bx2 */
static void place(int shape, int split, int l, int r, uint32_t *lane, uint32_t *column) {
    switch (shape) {
    case 0: *lane = (uint32_t)l, *column = (uint32_t)r; break;
    case 1: *lane = (uint32_t)((l & 1) * 8 + l / 4), *column = (uint32_t)((l >> 1 & 1) + 2 * r); break;
    case 2: *lane = (uint32_t)(l / 4 + (r & 1) * 8), *column = (uint32_t)(l % 4 + 4 * (r >> 1)); break;
    case 3: *lane = (uint32_t)(l / 4 + (r >> 1 & 1) * 8), *column = (uint32_t)(l % 4 * 2 + (r & 1) + 8 * (r >> 2)); break;
    default: *lane = (uint32_t)(l & 15), *column = (uint32_t)(r + (l >> 4) * split);
    }
}

static void check_lanes(Machine *m, Warp *w, uint32_t address, int shape) {
    uint32_t lane = address >> 16, own = (uint32_t)(w->index & 3) * 32, rows = shape ? 16 : 32;
    if (lane < own || lane + rows > own + 32)
        fault(m, "tensor memory", 0, "warp %d may reach lanes %u to %u; the access covers %u to %u", w->index, own, own + 31, lane, lane + rows - 1);
}

/* a = shape, repetitions, packed, split, address (3), registers, the registers, their numbers */
OP(tmem_ld) {
    uint32_t address = (uint32_t)effective_address(w, a + 4, 0), lane, column;
    int n = a[7];
    if (a[2]) fault(m, "not implemented", on, "tcgen05.ld with .pack::16b");
    check_lanes(m, w, address, a[0]);
    Access access = {agent(w, AGENT_TMEM_LD), w->tmem_loads + 1, pc_of(w), ASYNC, READ};
    for (int r = 0; r < n; r++) EACH {
        place(a[0], a[3], l, r, &lane, &column);
        uint32_t v = *tmem_at(m, w, w->cta, (address >> 16) + lane, (address & 0xffff) + column, 1, access);
        if (a[8 + r] >= 0) ((uint32_t *)(w->registers + a[8 + r]))[l] = v;
    }
    for (int r = 0; r < n; r++) {
        int32_t number = a[8 + n + r];
        if (!w->busy[number]) w->busy_registers++;
        w->busy[number] = 1u << 31 | (uint32_t)pc_of(w);
    }
    w->tmem_open |= 1;
    m->counts[COUNT_TMEM_BYTES] += 128ull * (uint64_t)n;
    return NEXT;
}

OP(tmem_st) {
    uint32_t address = (uint32_t)effective_address(w, a + 4, 0), lane, column;
    if (a[2]) fault(m, "not implemented", on, "tcgen05.st with .unpack::16b");
    check_lanes(m, w, address, a[0]);
    Access access = {agent(w, AGENT_TMEM_ST), w->tmem_stores + 1, pc_of(w), ASYNC, WRITE};
    for (int r = 0; r < a[7]; r++) EACH {
        place(a[0], a[3], l, r, &lane, &column);
        *tmem_at(m, w, w->cta, (address >> 16) + lane, (address & 0xffff) + column, 1, access) = u32(w, a[8 + r])[l];
    }
    w->tmem_open |= 2;
    m->counts[COUNT_TMEM_BYTES] += 128ull * (uint64_t)a[7];
    m->progress++;
    return NEXT;
}

OP(tmem_wait) {                  /* 0: loads, 1: stores */
    (void)on;
    if (a[0]) {
        w->clock.done[agent(w, AGENT_TMEM_ST)] = ++w->tmem_stores;
        w->tmem_open &= ~2;
        return NEXT;
    }
    w->clock.done[agent(w, AGENT_TMEM_LD)] = ++w->tmem_loads;
    w->tmem_open &= ~1;
    for (int i = 0; i < m->n_registers && w->busy_registers; i++)
        if (w->busy[i] >> 31) w->busy[i] = 0, w->busy_registers--;
    return NEXT;
}

/* ---- order between threads ---- */
static void cover(Warp *w) {     /* what this thread did, and what others did that it may itself rely on */
    uint32_t *covered = w->clock.covered;
    for (uint32_t i = 0; i < w->cta->m->agents; i++) if (covered[i] < w->tcgen_after[i]) covered[i] = w->tcgen_after[i];
    for (int k = AGENT_TMEM_LD; k <= AGENT_TMEM_ST; k += MAX_WARPS) covered[agent(w, k)] = w->clock.done[agent(w, k)];
}

OP(tcgen_fence) {                /* a[0]: after_thread_sync, else before */
    (void)on;
    if (!a[0]) cover(w);
    else for (uint32_t i = 0; i < m->agents; i++) if (w->tcgen_after[i] < w->clock.covered[i]) w->tcgen_after[i] = w->clock.covered[i];
    return NEXT;
}

/* ---- mma ---- */
static MatrixDescriptor blackwell_descriptor(Machine *m, uint64_t v) {
    static const int swizzles[8] = {0, -1, 3, -1, 2, -1, 1, -1};
    int s = swizzles[v >> 61];
    if (s < 0) fault(m, "not implemented", 0, "a matrix descriptor of layout type %d", (int)(v >> 61));
    if ((v >> 46 & 3) != 1) fault(m, "descriptor", 0, "a matrix descriptor of version %d; tcgen05 takes version 1", (int)(v >> 46 & 3));
    if (v >> 49 & 15) fault(m, "not implemented", 0, "a matrix descriptor with a base offset or an absolute leading offset");
    return (MatrixDescriptor){(uint32_t)(v & 0x3fff) << 4, (uint32_t)(v >> 16 & 0x3fff) << 4, (uint32_t)(v >> 32 & 0x3fff) << 4, (uint32_t)s};
}

/* Where row i of an m-row accumulator lies: lane, and for two CTAs with m = 128 the columns start over at the second half of n. */
static uint32_t accumulator_lane(int rows, int i) { return rows == 64 ? (uint32_t)(i / 16 * 32 + i % 16) : (uint32_t)i; }

/* a = d (3), a in tensor memory, a (3), b descriptor, instruction descriptor, enable-input-d, kind, CTAs, n masks, masks */
OP(tcgen_mma) {
    int l = first_lane(on), group = a[11], size_k;
    if (on & (on - 1)) fault(m, "tcgen05", on, "tcgen05.mma issued by %d threads of a warp", __builtin_popcount(on));
    uint32_t d = (uint32_t)effective_address(w, a, l), idesc = u32(w, a[8])[l];
    int rows = (int)(idesc >> 24 & 31) * 16, n = (int)(idesc >> 17 & 63) * 8, add = predicate(w, a[9]) >> l & 1;
    int fa = idesc >> 7 & 7, fb = idesc >> 10 & 7, a_mn = idesc >> 15 & 1, b_mn = idesc >> 16 & 1, fc = idesc >> 4 & 3;
    static const element_t f16_types[2] = {FP16, BF16}, f8_types[2] = {E4M3, E5M2};
    element_t ta, tb;
    if (a[10] == 0 && fa < 2 && fb < 2) ta = f16_types[fa], tb = f16_types[fb];
    else if (a[10] == 1 && fa == 2 && fb == 2) ta = tb = TF32;
    else if (a[10] == 2 && fa < 2 && fb < 2) ta = f8_types[fa], tb = f8_types[fb];
    else fault(m, "descriptor", on, "instruction descriptor 0x%08x: formats %d and %d for this kind", idesc, fa, fb);
    if (fc != 1) fault(m, "not implemented", on, "tcgen05.mma with an accumulator that is not fp32 (instruction descriptor 0x%08x)", idesc);
    if (idesc & 4) fault(m, "not implemented", on, "sparse tcgen05.mma");
    size_k = 32 / element_size(ta);
    int per_cta = rows / group, n_step = per_cta == 64 && group == 1 ? 8 : 16;
    if ((group == 1 && rows != 64 && rows != 128) || (group == 2 && rows != 128 && rows != 256) || n < n_step || n > 256 || n % n_step || (group == 2 && n % 32 && n % 16))
        fault(m, "descriptor", on, "instruction descriptor 0x%08x: m = %d, n = %d with cta_group::%d", idesc, rows, n, group);
    if (group == 2 && (m->n_ctas < 2 || w->cta->rank & 1)) fault(m, "tcgen05", on, "cta_group::2 is issued by the even CTA of a pair");
    static float A[128 * 32], B[256 * 32], C[256], D[256];
    static int EA[128 * 32], EB[256 * 32];
    Access read = async_access(w, agent(w, AGENT_TCGEN), ++w->tcgen_ops, READ), write = read;
    write.kind = WRITE;
    MatrixDescriptor db = blackwell_descriptor(m, u64(w, a[7])[l]);
    for (int half = 0; half < group; half++)            /* each CTA of a pair holds its part of b */
        load_matrix(m, w, &m->ctas[w->cta->rank + (uint32_t)half], &db, !b_mn, tb, 0, n / group, size_k, B + half * (n / group) * size_k, read);
    if (idesc >> 14 & 1) for (int i = 0; i < n * size_k; i++) B[i] = -B[i];
    exponents(tb, B, n * size_k, EB);
    for (int half = 0; half < group; half++) {
        Cta *c = &m->ctas[w->cta->rank + (uint32_t)half];
        if (a[3]) {
            uint32_t at = (uint32_t)effective_address(w, a + 4, l);
            int per = 4 / element_size(ta);
            for (int i = 0; i < per_cta; i++) {
                const uint32_t *p = tmem_at(m, w, c, accumulator_lane(per_cta, i) + (at >> 16), at & 0xffff, (uint32_t)(size_k / per), read);
                for (int k = 0; k < size_k; k++) A[i * size_k + k] = element_value(ta, per == 1 ? p[k] : p[k / per] >> (32 / per * (k % per)));
            }
        } else {
            MatrixDescriptor da = blackwell_descriptor(m, u64(w, a[4])[l]);
            load_matrix(m, w, c, &da, !a_mn, ta, 0, per_cta, size_k, A, read);
        }
        if (idesc >> 13 & 1) for (int i = 0; i < per_cta * size_k; i++) A[i] = -A[i];
        exponents(ta, A, per_cta * size_k, EA);
        int folded = group == 2 && per_cta == 64;       /* 64 rows a CTA: columns n/2 and up lie in lanes 64 and up */
        for (int i = 0; i < per_cta; i++)
            for (int part = 0; part < 1 + folded; part++) {
                int columns = folded ? n / 2 : n, first = part * columns;
                uint32_t lane = (folded ? (uint32_t)(i + 64 * part) : accumulator_lane(per_cta, i)) + (d >> 16);
                if (a[12] && u32(w, a[13 + (int)lane / 32 + (group == 2 ? 4 * half : 0)])[l] >> (lane % 32) & 1) continue;
                if (add) memcpy(C, tmem_at(m, w, c, lane, d & 0xffff, (uint32_t)columns, read), (size_t)columns * 4);
                else memset(C, 0, (size_t)columns * 4);
                accumulate(A + i * size_k, EA + i * size_k, B + first * size_k, EB + first * size_k, C, D, columns, size_k);
                memcpy(tmem_at(m, w, c, lane, d & 0xffff, (uint32_t)columns, write), D, (size_t)columns * 4);
            }
    }
    w->tcgen_uncommitted = 1;
    m->counts[count_of(ta)] += 2ull * (uint64_t)rows * (uint64_t)n * (uint64_t)size_k;
    m->progress++;
    return NEXT;
}

OP(tcgen_cp) {                   /* address (3), descriptor, shape (0: 128x256b, 1: 128x128b), CTAs */
    int l = first_lane(on);
    uint32_t to = (uint32_t)effective_address(w, a, l);
    if (on & (on - 1)) fault(m, "tcgen05", on, "tcgen05.cp issued by %d threads of a warp", __builtin_popcount(on));
    MatrixDescriptor d = blackwell_descriptor(m, u64(w, a[3])[l]);
    Access read = async_access(w, agent(w, AGENT_TCGEN), ++w->tcgen_ops, READ), write = read;
    write.kind = WRITE;
    int columns = a[4] == 0 ? 8 : 4;
    for (int half = 0; half < a[5]; half++) {
        Cta *c = &m->ctas[(w->cta->rank + (uint32_t)half) % (uint32_t)m->n_ctas];
        for (int i = 0; i < 128; i++) {
            uint32_t *p = tmem_at(m, w, c, (uint32_t)i + (to >> 16), to & 0xffff, (uint32_t)columns, write);
            for (int k = 0; k < columns; k += 4) {
                uint32_t at = swizzle(d.start + matrix_offset(&d, 1, 4, i, k), d.swizzle_bits);
                Cta *owner;
                shared_at(m, w, at | c->rank << 24, 16, &owner);
                touch_shared(m, w, c, at, 16, read);
                memcpy(p + k, c->shared + at, 16);
            }
        }
    }
    w->tcgen_uncommitted = 1;
    m->progress++;
    return NEXT;
}

/* a = mbarrier (3), mask or -1, CTAs: the mbarrier hears when the thread's tcgen05 operations so far are done */
OP(tcgen_commit) {
    int l = first_lane(on);
    uint32_t at = (uint32_t)effective_address(w, a, l), mask = a[3] == -1 ? 1u << (at >> 24) : ((const uint16_t *)operand(w, a[3]))[l];
    uint32_t unit = agent(w, AGENT_TCGEN), before = w->clock.done[unit], covered = w->clock.covered[unit];
    cover(w);
    if (on & (on - 1)) fault(m, "tcgen05", on, "tcgen05.commit issued by %d threads of a warp", __builtin_popcount(on));
    for (uint32_t r = 0; r < 16; r++) if (mask >> r & 1) {
        Cta *c;
        if (r >= (uint32_t)m->n_ctas) fault(m, "out of bounds", on, "tcgen05.commit to CTA rank %u of a cluster of %d", r, m->n_ctas);
        Mbarrier *b = mbarrier_at(m, w, shared_offset(at) | r << 24, &c);
        mbarrier_for_async(m, b, c);
        w->clock.done[unit] = w->clock.covered[unit] = w->tcgen_ops;
        clock_join(m, b->arriving, w->clock);
        w->clock.done[unit] = before, w->clock.covered[unit] = covered;   /* the issuing thread itself has not waited */
        mbarrier_arrive(m, b, c, 1);
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    w->tcgen_uncommitted = 0;
    m->counts[COUNT_BARRIERS]++;
    return NEXT;
}
