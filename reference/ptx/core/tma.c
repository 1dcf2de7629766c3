/* Bulk copies: TMA tensor copies in both directions, with the descriptor decoded from its bytes, and plain bulk copies.

   A copy happens at once, but nobody may rely on that: its writes belong to the mbarrier's phase, its reads to the bulk group,
   and the order checks see whoever touches the memory without having waited for them. */
#include "machine.h"

/* ---- the descriptor ---- */
typedef struct {
    uint64_t base, stride[5];    /* stride[0] is the element's size */
    uint32_t size[5], box[5];
    int rank, element, swizzle_bits, tf32;
} TensorMap;

static TensorMap decode(Machine *m, const uint8_t *d) {
    /* element sizes by type: u8 u16 u32 s32 u64 s64 f16 f32 f64 f32.ftz bf16 */
    static const int sizes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 4, 2, 4, 4, 0, 0, 0};
    TensorMap t = {0};
    uint32_t word;
    memcpy(&t.base, d, 8);
    memcpy(&word, d + 8, 4);
    t.rank = (int)(word >> 4 & 7) + 1;
    t.element = sizes[word >> 7 & 15];
    t.swizzle_bits = (int)(word >> 13 & 3);
    t.tf32 = (word >> 7 & 15) == 7 && word >> 16 & 1;
    if (t.base % 16) fault(m, "misaligned", 0, "a tensor map of memory at 0x%llx, not a multiple of 16 bytes", (unsigned long long)t.base);
    if ((word & 15) != 2 || t.rank > 5 || !t.element) fault(m, "tensor map", 0, "the 128 bytes at the tensor map's address are no descriptor this machine knows (word 0x%08x)", word);
    t.stride[0] = (uint64_t)t.element;
    for (int i = 0; i < t.rank; i++) {
        uint32_t v;
        memcpy(&v, d + 32 + 4 * i, 4);
        t.size[i] = v + 1;
        t.box[i] = d[55 + i] + 1u;
        if (i) {
            memcpy(&v, d + 8 + 4 * i, 4);
            t.stride[i] = (uint64_t)v * 16;
        }
    }
    return t;
}

static TensorMap tensor_map(Machine *m, Warp *w, const int32_t *a, int lane) {
    uint64_t address = effective_address(w, a, lane), window = address & 0xff00000000000000ull;
    if (address % 64) fault(m, "misaligned", 1u << lane, "a tensor map at address 0x%llx", (unsigned long long)address);
    if (window == PARAM_WINDOW) {
        uint64_t offset = address & ~PARAM_WINDOW;
        if (offset + 128 > m->param_size) fault(m, "out of bounds", 1u << lane, "a tensor map at parameter offset %llu", (unsigned long long)offset);
        return decode(m, m->param + offset);
    }
    if (window) fault(m, "tensor map", 1u << lane, "a tensor map outside of parameters and global memory");
    return decode(m, global_at(m, w, address, 128, own_access(w, READ), lane));
}

static float round_tf32(float x) {                   /* to nearest even at 10 bits of mantissa */
    uint32_t b;
    memcpy(&b, &x, 4);
    if ((b & 0x7f800000) == 0x7f800000) return x;
    b = (b + 0xfff + (b >> 13 & 1)) & 0xffffe000u;
    memcpy(&x, &b, 4);
    return x;
}

/* ---- one box ---- */
typedef struct { Cta *cta; Mbarrier *barrier; Cta *barrier_cta; } Target;

static Access target_access(Warp *w, const Target *t, access_kind_t kind) {
    return async_access(w, mbarrier_agent(t->barrier, t->barrier_cta), t->barrier->phase + 1, kind);
}

static Access bulk_write(Warp *w, int reduction) {
    return async_access(w, agent(w, AGENT_BULK_WRITE), w->bulk.committed + 1, reduction < 0 ? WRITE : ATOMIC);
}

static void check_box(Machine *m, const TensorMap *t, uint32_t offset, int lane) {
    uint32_t inner = t->box[0] * (uint32_t)t->element;
    if (offset % 128) fault(m, "misaligned", 1u << lane, "a tensor copy at shared address %u, not a multiple of 128", offset);
    if (inner % 16) fault(m, "tensor map", 1u << lane, "the box's rows have %u bytes, not a multiple of 16", inner);
    if (t->swizzle_bits && inner > 16u << t->swizzle_bits) fault(m, "tensor map", 1u << lane, "the box's rows of %u bytes exceed the swizzle's %u", inner, 16u << t->swizzle_bits);
}

static void load_box(Machine *m, Warp *w, const TensorMap *t, const int32_t *at, uint32_t offset, Target *targets, int n_targets) {
    uint32_t inner = t->box[0] * (uint32_t)t->element, rows = 1, end = SHARED_BASE + m->static_shared + m->dynamic_shared;
    for (int i = 1; i < t->rank; i++) rows *= t->box[i];
    if (offset < SHARED_BASE || offset + rows * inner > end)
        fault(m, "out of bounds", 0, "a box of %u bytes at shared address %u; the CTA has %u to %u", rows * inner, offset, SHARED_BASE, end);
    uint8_t row[256 * 16];
    Access read = target_access(w, targets, READ);
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t rest = r;
        uint64_t address = t->base;
        int inside = 1;
        for (int i = 1; i < t->rank; i++) {
            int64_t x = (int64_t)at[i] + rest % t->box[i];
            rest /= t->box[i];
            inside &= x >= 0 && x < t->size[i];
            address += (uint64_t)x * t->stride[i];
        }
        memset(row, 0, inner);
        int64_t first = at[0], last = (int64_t)at[0] + t->box[0];
        if (first < 0) first = 0;
        if (last > t->size[0]) last = t->size[0];
        if (inside && first < last) {
            uint32_t bytes = (uint32_t)(last - first) * (uint32_t)t->element;
            memcpy(row + (first - at[0]) * t->element, global_at(m, w, address + (uint64_t)first * (uint64_t)t->element, bytes, read, -1), bytes);
            m->counts[COUNT_TMA_LOAD_BYTES] += bytes;
        }
        if (t->tf32) for (uint32_t i = 0; i < t->box[0]; i++) ((float *)row)[i] = round_tf32(((float *)row)[i]);
        for (uint32_t i = 0; i < inner; i += 16) {
            uint32_t to = swizzle(offset + r * inner + i, (uint32_t)t->swizzle_bits);
            for (int k = 0; k < n_targets; k++) {
                memcpy(targets[k].cta->shared + to, row + i, 16);
            }
        }
    }
    for (int k = 0; k < n_targets; k++) {
        memset(targets[k].cta->tile_swizzle + offset / 16, t->swizzle_bits + 1, rows * inner / 16);
        touch_shared(m, w, targets[k].cta, offset, rows * inner, target_access(w, &targets[k], WRITE));
    }
}

static void combine(Machine *m, const TensorMap *t, int op, uint8_t *to, const uint8_t *from, uint32_t bytes) {
    if (op < 0) {
        memcpy(to, from, bytes);
        return;
    }
    for (uint32_t i = 0; i < bytes; i += (uint32_t)t->element) {
        if (t->element != 4 || op > 2) fault(m, "not implemented", 0, "a reducing tensor copy of this type or operation");
        float x, y;
        memcpy(&x, to + i, 4), memcpy(&y, from + i, 4);
        x = op == 0 ? x + y : op == 1 ? (y < x ? y : x) : (y > x ? y : x);
        memcpy(to + i, &x, 4);
    }
}

static void store_box(Machine *m, Warp *w, const TensorMap *t, const int32_t *at, Cta *cta, uint32_t offset, int op, int lane) {
    uint32_t inner = t->box[0] * (uint32_t)t->element, rows = 1, end = SHARED_BASE + m->static_shared + m->dynamic_shared;
    for (int i = 1; i < t->rank; i++) rows *= t->box[i];
    if (offset < SHARED_BASE || offset + rows * inner > end)
        fault(m, "out of bounds", 0, "a box of %u bytes at shared address %u; the CTA has %u to %u", rows * inner, offset, SHARED_BASE, end);
    touch_shared(m, w, cta, offset, rows * inner, async_access(w, agent(w, AGENT_BULK), w->bulk.committed + 1, READ));
    touch_lane(m, w, cta, offset, rows * inner, lane, READ);
    uint8_t row[256 * 16];
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t rest = r;
        uint64_t address = t->base;
        int inside = 1;
        for (int i = 1; i < t->rank; i++) {
            int64_t x = (int64_t)at[i] + rest % t->box[i];
            rest /= t->box[i];
            inside &= x >= 0 && x < t->size[i];
            address += (uint64_t)x * t->stride[i];
        }
        int64_t first = at[0] < 0 ? 0 : at[0], last = (int64_t)at[0] + t->box[0];
        if (last > t->size[0]) last = t->size[0];
        if (!inside || first >= last) continue;
        for (uint32_t i = 0; i < inner; i += 16) memcpy(row + i, cta->shared + swizzle(offset + r * inner + i, (uint32_t)t->swizzle_bits), 16);
        uint32_t bytes = (uint32_t)(last - first) * (uint32_t)t->element;
        uint8_t *to = global_at(m, w, address + (uint64_t)first * (uint64_t)t->element, bytes, bulk_write(w, op), -1);
        combine(m, t, op, to, row + (first - at[0]) * t->element, bytes);
        m->counts[COUNT_TMA_STORE_BYTES] += bytes;
    }
}

/* The CTAs that a multicast copy reaches, each with the mbarrier that hears of it. */
static int find_targets(Machine *m, Warp *w, uint32_t to, uint32_t barrier, int32_t mask_operand, int lane, Target *targets) {
    int n = 0;
    uint32_t mask = mask_operand == -1 ? 0 : ((const uint16_t *)operand(w, mask_operand))[lane];
    for (uint32_t r = 0; r < (uint32_t)m->n_ctas || (mask_operand != -1 && mask >> r); r++) {
        if (mask_operand == -1 ? r != to >> 24 : !(mask >> r & 1)) continue;
        if (r >= (uint32_t)m->n_ctas) fault(m, "out of bounds", 1u << lane, "a multicast to CTA rank %u of a cluster of %d", r, m->n_ctas);
        uint32_t at = mask_operand == -1 ? barrier : shared_offset(barrier) | (r & ~1u) << 24 | (((barrier >> 24) ^ (to >> 24) ^ r) & 1) << 24;
        targets[n].cta = &m->ctas[r];
        targets[n].barrier = mbarrier_at(m, w, at, &targets[n].barrier_cta);
        mbarrier_for_async(m, targets[n].barrier, targets[n].barrier_cta);
        n++;
    }
    return n;
}

/* a = destination (3), map (3), mbarrier (3), mask or -1, pair, dimensions, coordinates */
OP(tma_load) {
    EACH if (ON(l)) {
        TensorMap t = tensor_map(m, w, a + 3, l);
        uint32_t to = (uint32_t)effective_address(w, a, l), barrier = (uint32_t)effective_address(w, a + 6, l), bytes = (uint32_t)t.element;
        int32_t at[5];
        if (a[11] != t.rank) fault(m, "tensor map", 1u << l, "%d coordinates for a tensor map of %d dimensions", a[11], t.rank);
        for (int i = 0; i < t.rank; i++) at[i] = (int32_t)u32(w, a[12 + i])[l], bytes *= t.box[i];
        check_box(m, &t, shared_offset(to), l);
        Target targets[16];
        int n = find_targets(m, w, to, barrier, a[9], l, targets);
        load_box(m, w, &t, at, shared_offset(to), targets, n);
        for (int k = 0; k < n; k++) {
            clock_join(m, targets[k].barrier->arriving, w->clock);
            mbarrier_transaction(m, targets[k].barrier, targets[k].barrier_cta, -(int64_t)bytes);
        }
        m->counts[COUNT_TMA_OPERATIONS]++;
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    return NEXT;
}

/* a = map (3), source (3), reduction or -1, dimensions, coordinates */
OP(tma_store) {
    EACH if (ON(l)) {
        TensorMap t = tensor_map(m, w, a, l);
        uint32_t from = (uint32_t)effective_address(w, a + 3, l);
        int32_t at[5];
        Cta *owner;
        if (a[7] != t.rank) fault(m, "tensor map", 1u << l, "%d coordinates for a tensor map of %d dimensions", a[7], t.rank);
        for (int i = 0; i < t.rank; i++) at[i] = (int32_t)u32(w, a[8 + i])[l];
        check_box(m, &t, shared_offset(from), l);
        shared_at(m, w, from, 16, &owner);
        store_box(m, w, &t, at, owner, shared_offset(from), a[6], l);
        m->counts[COUNT_TMA_OPERATIONS]++;
    }
    w->bulk.open = 1;
    w->bulk_lanes |= on;
    m->progress++;
    return NEXT;
}

/* a = destination (3), source (3), bytes, mbarrier (3), mask or -1, source is shared */
OP(bulk_load) {
    EACH if (ON(l)) {
        uint32_t to = (uint32_t)effective_address(w, a, l), barrier = (uint32_t)effective_address(w, a + 7, l), bytes = u32(w, a[6])[l];
        uint64_t from = effective_address(w, a + 3, l);
        Target targets[16];
        if (to % 16 || from % 16 || bytes % 16) fault(m, "misaligned", 1u << l, "a bulk copy of %u bytes from 0x%llx to shared address %u", bytes, (unsigned long long)from, to);
        int n = find_targets(m, w, to, barrier, a[10], l, targets);
        Cta *owner = NULL;
        const uint8_t *p;
        if (!bytes) continue;
        if (a[11]) {
            p = shared_at(m, w, (uint32_t)from, bytes, &owner);
            touch_shared(m, w, owner, shared_offset((uint32_t)from), bytes, target_access(w, targets, READ));
        } else {
            p = global_at(m, w, from, bytes, target_access(w, targets, READ), -1);
            m->counts[COUNT_TMA_LOAD_BYTES] += bytes;
        }
        for (int k = 0; k < n; k++) {
            Target *t = &targets[k];
            shared_at(m, w, shared_offset(to) | t->cta->rank << 24, bytes, &owner);
            memcpy(t->cta->shared + shared_offset(to), p, bytes);
            touch_shared(m, w, t->cta, shared_offset(to), bytes, target_access(w, t, WRITE));
            clock_join(m, t->barrier->arriving, w->clock);
            mbarrier_transaction(m, t->barrier, t->barrier_cta, -(int64_t)bytes);
        }
        m->counts[COUNT_TMA_OPERATIONS]++;
    }
    w->clock.done[agent(w, AGENT_WARP)]++;
    return NEXT;
}

/* a = destination (3), source (3), bytes, reduction or -1, kind */
OP(bulk_store) {
    EACH if (ON(l)) {
        uint64_t to = effective_address(w, a, l);
        uint32_t from = (uint32_t)effective_address(w, a + 3, l), bytes = u32(w, a[6])[l];
        Cta *owner;
        if (to % 16 || from % 16 || bytes % 16) fault(m, "misaligned", 1u << l, "a bulk copy of %u bytes from shared address %u to 0x%llx", bytes, from, (unsigned long long)to);
        if (!bytes) continue;
        const uint8_t *p = shared_at(m, w, from, bytes, &owner);
        touch_shared(m, w, owner, shared_offset(from), bytes, async_access(w, agent(w, AGENT_BULK), w->bulk.committed + 1, READ));
        touch_lane(m, w, owner, shared_offset(from), bytes, l, READ);
        if (a[7] >= 0 && a[8] != 4) fault(m, "not implemented", 1u << l, "a reducing bulk copy of this type");
        TensorMap t = {.element = 4};
        combine(m, &t, a[7], global_at(m, w, to, bytes, bulk_write(w, a[7]), -1), p, bytes);
        m->counts[COUNT_TMA_STORE_BYTES] += bytes;
        m->counts[COUNT_TMA_OPERATIONS]++;
    }
    w->bulk.open = 1;
    w->bulk_lanes |= on;
    m->progress++;
    return NEXT;
}

/* Groups are a thread's own: a commit or a wait without all lanes that copied says nothing. */
OP(bulk_commit) {
    (void)m, (void)a;
    if (w->bulk_lanes & ~on) return NEXT;
    w->bulk.committed++;
    w->bulk.open = 0;
    return NEXT;
}
OP(bulk_wait) {                  /* all but the last a[0] groups have read their sources and, unless a[1], written their destinations */
    (void)m;
    if (w->bulk_lanes & ~on) return NEXT;
    uint32_t upto = w->bulk.committed > (uint32_t)a[0] ? w->bulk.committed - (uint32_t)a[0] : 0;
    uint32_t *read = &w->clock.done[agent(w, AGENT_BULK)], *written = &w->clock.done[agent(w, AGENT_BULK_WRITE)];
    if (upto > *read) *read = upto;
    if (!a[1] && upto > *written) *written = upto;
    return NEXT;
}
