/* Memory spaces: global, shared (of any CTA of the cluster), local and parameters; loads, stores, atomics, cp.async.

   A global address is a host address, and must lie inside one of the launch's allocations. A shared address is
   rank << 24 | offset, which every CTA of the cluster can name. Generic addresses of the other spaces lie in windows
   that no host address reaches. */
#include "machine.h"
#include <math.h>

uint8_t *shared_at(Machine *m, Warp *w, uint32_t address, uint32_t bytes, Cta **owner) {
    uint32_t rank = address >> 24, offset = shared_offset(address), end = SHARED_BASE + m->static_shared + m->dynamic_shared;
    if (rank >= (uint32_t)m->n_ctas)
        fault(m, "out of bounds", 0, "shared address 0x%08x names CTA rank %u of a cluster of %d", address, rank, m->n_ctas);
    if (offset < SHARED_BASE || offset + bytes > end)
        fault(m, "out of bounds", 0, "%u bytes at shared address %u; the CTA has %u to %u", bytes, offset, SHARED_BASE, end);
    *owner = &m->ctas[rank];
    if (*owner != w->cta) {
        int live = 0;
        for (int i = 0; i < (*owner)->n_warps; i++) live |= (*owner)->warps[i].live != 0;
        if (!live) fault(m, "exited CTA", 0, "%u bytes at shared address %u of CTA rank %u, which has ended", bytes, offset, rank);
    }
    return (*owner)->shared + offset;
}

static Allocation *last_hit;

uint8_t *global_at(Machine *m, Warp *w, uint64_t address, uint32_t bytes, Access access, int lane) {
    Allocation *r = last_hit;
    if (!r || r < m->allocations || r >= m->allocations + m->n_allocations || address < r->start || address + bytes > r->start + r->size) {
        r = NULL;
        for (int i = 0; i < m->n_allocations && !r; i++)
            if (address >= m->allocations[i].start && address + bytes <= m->allocations[i].start + m->allocations[i].size) r = &m->allocations[i];
        if (!r) {
            for (int i = 0; i < m->n_allocations; i++) {       /* name the neighbour: the likely culprit */
                int64_t beyond = (int64_t)(address + bytes - (m->allocations[i].start + m->allocations[i].size));
                int64_t before = (int64_t)(m->allocations[i].start - address);
                if ((beyond > 0 && beyond < 1 << 20) || (before > 0 && before < 1 << 20))
                    fault(m, "out of bounds", 0, "%u bytes at global address 0x%llx: %lld bytes %s tensor %d of %llu bytes", bytes,
                          (unsigned long long)address, (long long)(beyond > 0 ? beyond : before), beyond > 0 ? "past the end of" : "before the start of",
                          i, (unsigned long long)m->allocations[i].size);
            }
            fault(m, "out of bounds", 0, "%u bytes at global address 0x%llx, in no tensor of the launch", bytes, (unsigned long long)address);
        }
        last_hit = r;
    }
    uint64_t at = address - r->start;
    if (m->strict) {
        if (r->written) {
            if (access.kind != WRITE)
                for (uint32_t i = 0; i < bytes; i++)
                    if (!r->written[at + i]) {
                        finding(m, "uninitialised", -1, 0, "reads byte %llu of tensor %d, which nothing has written", (unsigned long long)(at + i), (int)(r - m->allocations));
                        break;
                    }
            if (access.kind != READ) memset(r->written + at, 1, bytes);
        }
        if (r->previous && !w->clock.done[w->cta->rank * AGENTS + AGENT_PREVIOUS_GRID])
            for (uint64_t i = at / 2; i < (at + bytes + 1) / 2; i++)
                if (r->previous[i].writer) {
                    finding(m, "race", -1, 0, "%s byte %llu of tensor %d, which the launch before wrote, with no griddepcontrol.wait on the path to it",
                            access.kind == READ ? "reads" : "writes", (unsigned long long)(2 * i), (int)(r - m->allocations));
                    break;
                }
        if (r->cells) touch_global(m, w, r, at, bytes, access, lane);
    }
    return (uint8_t *)address;
}

/* An encoded address is three integers: register, whether it is 64 bits wide, displacement. */
uint64_t effective_address(const Warp *w, const int32_t *a, int lane) {
    uint64_t base = a[1] ? u64(w, a[0])[lane] : u32(w, a[0])[lane];
    base += (uint64_t)(int64_t)a[2];
    return a[1] ? base : (uint32_t)base;
}

uint8_t *any_at(Machine *m, Warp *w, int lane, int space, uint64_t address, uint32_t bytes, access_kind_t kind) {
    uint64_t window = address & 0xff00000000000000ull;
    if (address % bytes && !(bytes & (bytes - 1)))
        fault(m, "misaligned", 1u << lane, "%u bytes at address 0x%llx", bytes, (unsigned long long)address);
    if (space == SPACE_SHARED || space == SPACE_CLUSTER || (space == SPACE_GENERIC && window == SHARED_WINDOW)) {
        Cta *owner;
        uint8_t *p = shared_at(m, w, (uint32_t)address, bytes, &owner);
        if (space == SPACE_SHARED && owner != w->cta)
            fault(m, "out of bounds", 1u << lane, "a .shared::cta access to the shared memory of CTA rank %u", owner->rank);
        uint32_t offset = shared_offset((uint32_t)address);
        if (owner->mbarrier_at[offset / 8] && m->strict)
            finding(m, "mbarrier overwritten", owner->mbarriers[owner->mbarrier_at[offset / 8] - 1].init_pc, 1u << lane,
                    "an ordinary %s at shared address %u, where an mbarrier lives", kind == READ ? "load" : "store", offset);
        w->touch_clock = w->clock.done[agent(w, AGENT_WARP)];
        touch_shared(m, w, owner, offset, bytes, own_access(w, kind));
        touch_lane(m, w, owner, offset, bytes, lane, kind);
        return p;
    }
    if (space == SPACE_LOCAL || (space == SPACE_GENERIC && window == LOCAL_WINDOW)) {
        uint64_t offset = address & ~LOCAL_WINDOW;
        if (offset + bytes > (uint64_t)m->local_bytes) fault(m, "out of bounds", 1u << lane, "%u bytes at local address %llu", bytes, (unsigned long long)offset);
        return w->local + (size_t)lane * (size_t)m->local_bytes + offset;
    }
    if (space == SPACE_PARAM || (space == SPACE_GENERIC && window == PARAM_WINDOW)) {
        uint64_t offset = address & ~PARAM_WINDOW;
        if (offset + bytes > m->param_size || kind != READ) fault(m, "out of bounds", 1u << lane, "%u bytes at parameter offset %llu", bytes, (unsigned long long)offset);
        return (uint8_t *)m->param + offset;
    }
    w->touch_clock = w->clock.done[agent(w, AGENT_WARP)];
    return global_at(m, w, address, bytes, own_access(w, kind), lane);
}

/* ---- counting ---- */
static void count_global(Machine *m, const uint64_t *address, lanes_t on, uint32_t bytes, int store) {
    uint64_t sector[2 * WARP * 2];
    uint32_t covered[2 * WARP * 2], n = 0, lines = 0, full_sectors = 0, full_lines = 0;
    EACH if (ON(l)) for (uint64_t p = address[l]; p < address[l] + bytes;) {
        uint64_t s = p / 32, end = (s + 1) * 32 < address[l] + bytes ? (s + 1) * 32 : address[l] + bytes;
        uint32_t mask = (uint32_t)(((1ull << (end - p)) - 1) << (p % 32)), i = n;
        while (i > 0 && sector[i - 1] != s) i--;
        if (i == 0) sector[n] = s, covered[n++] = mask;
        else covered[i - 1] |= mask;
        p = end;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t in_line = 0, earlier = 0;
        for (uint32_t k = 0; k < n; k++) if (sector[k] / 4 == sector[i] / 4) {
            in_line += covered[k] == ALL_LANES;
            earlier |= k < i;
        }
        full_sectors += covered[i] == ALL_LANES;
        if (!earlier) lines++, full_lines += in_line == 4;
    }
    uint64_t *c = m->counts + (store ? COUNT_GLOBAL_STORE_BYTES : COUNT_GLOBAL_LOAD_BYTES);
    c[0] += (uint64_t)__builtin_popcount(on) * bytes, c[1] += n, c[2] += lines;
    if (store) m->counts[COUNT_GLOBAL_STORE_FULL_SECTORS] += full_sectors, m->counts[COUNT_GLOBAL_STORE_FULL_LINES] += full_lines;
}

/* Wavefronts: how many passes over the 32 banks an access needs; wide accesses go by half or quarter warps. */
static void count_shared(Machine *m, const uint64_t *address, lanes_t on, uint32_t bytes, int store) {
    uint32_t words = bytes < 4 ? 1 : bytes / 4, group = WARP / (words > 4 ? 4 : words), passes = 0;
    for (uint32_t first = 0; first < WARP; first += group) {
        uint32_t seen[WARP][WARP], n[WARP] = {0}, most = 0;
        for (uint32_t l = first; l < first + group; l++) if (on >> l & 1)
            for (uint32_t k = 0; k < words; k++) {
                uint32_t word = (uint32_t)address[l] / 4 + k, bank = word % 32, i = 0;
                while (i < n[bank] && seen[bank][i] != word) i++;
                if (i == n[bank] && i < WARP) seen[bank][n[bank]++] = word;
                if (n[bank] > most) most = n[bank];
            }
        passes += most;
    }
    m->counts[store ? COUNT_SHARED_STORE_BYTES : COUNT_SHARED_LOAD_BYTES] += (uint64_t)__builtin_popcount(on) * bytes;
    m->counts[store ? COUNT_SHARED_STORE_WAVEFRONTS : COUNT_SHARED_LOAD_WAVEFRONTS] += passes;
}

static void count(Machine *m, int space, const uint64_t *address, lanes_t on, uint32_t bytes, int store) {
    uint64_t window = address[first_lane(on)] & 0xff00000000000000ull;
    if (space == SPACE_SHARED || space == SPACE_CLUSTER || (space == SPACE_GENERIC && window == SHARED_WINDOW)) count_shared(m, address, on, bytes, store);
    else if (space == SPACE_GLOBAL || (space == SPACE_GENERIC && !window)) count_global(m, address, on, bytes, store);
}

/* ---- loads and stores ---- */
/* a = space, bytes of an element, elements, signed, address (3), orders other threads, then for each element register (-1: none), its bits */
OP(load) {
    uint32_t size = (uint32_t)a[1], n = (uint32_t)a[2];
    uint64_t address[WARP];
    EACH if (ON(l)) address[l] = effective_address(w, a + 4, l);
    if (a[7] && (a[0] == SPACE_GLOBAL || a[0] == SPACE_GENERIC)) m->ctas_synchronise = 1;
    EACH if (ON(l)) {
        const uint8_t *p = any_at(m, w, l, a[0], address[l], size * n, READ);
        for (uint32_t i = 0; i < n; i++) {
            if (a[8 + 2 * i] < 0) continue;
            uint64_t v = 0;
            memcpy(&v, p + i * size, size);
            if (a[3] && size < 8 && v >> (8 * size - 1) & 1) v |= ~0ull << 8 * size;
            uint8_t *d = w->registers + a[8 + 2 * i];
            if (a[9 + 2 * i] == 16) ((uint16_t *)d)[l] = (uint16_t)v;
            else if (a[9 + 2 * i] == 32) ((uint32_t *)d)[l] = (uint32_t)v;
            else ((uint64_t *)d)[l] = v;
        }
    }
    count(m, a[0], address, on, size * n, 0);
    return NEXT;
}

/* a = space, bytes of an element, elements, -, address (3), orders other threads, then for each element operand, its register bits */
OP(store) {
    uint32_t size = (uint32_t)a[1], n = (uint32_t)a[2];
    uint64_t address[WARP];
    EACH if (ON(l)) address[l] = effective_address(w, a + 4, l);
    if (a[7] && (a[0] == SPACE_GLOBAL || a[0] == SPACE_GENERIC)) m->ctas_synchronise = 1;
    EACH if (ON(l)) {
        uint8_t *p = any_at(m, w, l, a[0], address[l], size * n, WRITE);
        for (uint32_t i = 0; i < n; i++) {
            const void *x = operand(w, a[8 + 2 * i]);
            uint64_t v = a[9 + 2 * i] == 16 ? ((const uint16_t *)x)[l] : a[9 + 2 * i] == 32 ? ((const uint32_t *)x)[l] : ((const uint64_t *)x)[l];
            memcpy(p + i * size, &v, size);
        }
    }
    count(m, a[0], address, on, size * n, 1);
    m->progress++;
    return NEXT;
}

/* ---- atomics ---- */
enum { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
enum { K_U32, K_S32, K_U64, K_S64, K_F32, K_F16X2, K_BF16X2, K_F64 };

static float half(uint16_t h, int bf16) { return element_value(bf16 ? BF16 : FP16, h); }

static uint64_t combine(int op, int kind, uint64_t old, uint64_t x, uint64_t y) {
    float f, g;
    double p, q;
    uint32_t a = (uint32_t)old, b = (uint32_t)x, r;
    memcpy(&f, &a, 4), memcpy(&g, &b, 4), memcpy(&p, &old, 8), memcpy(&q, &x, 8);
    switch (op) {
    case A_EXCH: return x;
    case A_CAS: return old == x ? y : old;
    case A_AND: return old & x;
    case A_OR: return old | x;
    case A_XOR: return old ^ x;
    case A_INC: return a >= b ? 0 : a + 1;
    case A_DEC: return a == 0 || a > b ? b : a - 1;
    case A_ADD:
        if (kind == K_F32) { f += g; memcpy(&r, &f, 4); return r; }
        if (kind == K_F64) { p += q; memcpy(&old, &p, 8); return old; }
        if (kind == K_F16X2 || kind == K_BF16X2) {
            int bf = kind == K_BF16X2;
            return (uint32_t)half_bits(half((uint16_t)a, bf) + half((uint16_t)b, bf), bf)
                   | (uint32_t)half_bits(half((uint16_t)(a >> 16), bf) + half((uint16_t)(b >> 16), bf), bf) << 16;
        }
        return old + x;
    default: {
        int less = kind == K_S32 ? (int32_t)a < (int32_t)b : kind == K_U32 ? a < b : kind == K_S64 ? (int64_t)old < (int64_t)x
                   : kind == K_F32 ? f < g : old < x;
        return less == (op == A_MIN) ? old : x;
    }
    }
}

/* a = d or -1, space, operation, kind, bytes, elements, address (3), then per element: value, second value (cas) */
OP(atomic) {
    uint32_t size = (uint32_t)a[4], n = (uint32_t)a[5];
    if (a[1] == SPACE_GLOBAL || a[1] == SPACE_GENERIC) m->ctas_synchronise = 1;
    EACH if (ON(l)) {
        uint64_t address = effective_address(w, a + 6, l);
        uint8_t *p = any_at(m, w, l, a[1], address, size * n, ATOMIC);
        for (uint32_t i = 0; i < n; i++, p += size) {
            uint64_t old = 0, x, y;
            memcpy(&old, p, size);
            x = size == 8 ? u64(w, a[9 + 2 * i])[l] : u32(w, a[9 + 2 * i])[l];
            y = size == 8 ? u64(w, a[10 + 2 * i])[l] : u32(w, a[10 + 2 * i])[l];
            uint64_t r = combine(a[2], a[3], old, x, y);
            memcpy(p, &r, size);
            if (a[0] >= 0) {
                if (size == 8) ((uint64_t *)(w->registers + a[0]))[l] = old;
                else ((uint32_t *)(w->registers + a[0]))[l] = (uint32_t)old;
            }
        }
        m->counts[COUNT_ATOMIC_BYTES] += size * n;
    }
    m->progress++;
    return NEXT;
}

/* ---- cp.async: each thread copies 4, 8 or 16 bytes to shared memory, later ---- */
/* a = destination (3), source (3), bytes, source bytes or the same in a register (-1: all) */
OP(cpasync) {
    uint32_t bytes = (uint32_t)a[6];
    EACH if (ON(l)) {
        uint32_t to = (uint32_t)effective_address(w, a, l);
        uint32_t from_bytes = a[7] == -1 ? bytes : u32(w, a[7])[l];
        Cta *owner;
        uint8_t *d = shared_at(m, w, to, bytes, &owner);
        if (to % bytes) fault(m, "misaligned", 1u << l, "cp.async of %u bytes to shared address %u", bytes, to);
        Access x = async_access(w, agent(w, AGENT_CPASYNC), w->cpasync.committed + 1, WRITE);
        x.proxy = GENERIC;
        touch_shared(m, w, owner, shared_offset(to), bytes, x);
        touch_lane(m, w, owner, shared_offset(to), bytes, l, WRITE);
        x.kind = READ;
        if (from_bytes) memcpy(d, global_at(m, w, effective_address(w, a + 3, l), from_bytes, x, l), from_bytes);
        memset(d + from_bytes, 0, bytes - from_bytes);
        m->counts[COUNT_CPASYNC_BYTES] += from_bytes;
    }
    return NEXT;
}
OP(cpasync_commit) { (void)m; (void)a; (void)on; w->cpasync.committed++; return NEXT; }
OP(cpasync_wait) {               /* all but the last a[0] groups */
    (void)m, (void)on;
    uint32_t upto = w->cpasync.committed > (uint32_t)a[0] ? w->cpasync.committed - (uint32_t)a[0] : 0, *done = &w->clock.done[agent(w, AGENT_CPASYNC)];
    if (upto > *done) *done = upto;
    return NEXT;
}
OP(cpasync_wait_all) {
    (void)m, (void)a, (void)on;
    w->clock.done[agent(w, AGENT_CPASYNC)] = ++w->cpasync.committed;
    return NEXT;
}

/* ---- addresses ---- */
OP(cvta_to_generic) {            /* d, source, source bits, window (0: none) */
    (void)m;
    uint64_t windows[] = {0, SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW};
    EACH if (ON(l)) ((uint64_t *)(w->registers + a[0]))[l] = (a[2] == 64 ? u64(w, a[1])[l] : u32(w, a[1])[l]) | windows[a[3]];
    return NEXT;
}
OP(cvta_from_generic) {          /* d, destination bits, source */
    (void)m;
    EACH if (ON(l)) {
        uint64_t v = u64(w, a[2])[l];
        if (v >> 56) v &= 0x00ffffffffffffffull;
        if (a[1] == 64) ((uint64_t *)(w->registers + a[0]))[l] = v;
        else ((uint32_t *)(w->registers + a[0]))[l] = (uint32_t)v;
    }
    return NEXT;
}
OP(mapa) {                       /* d, bits, address, rank, generic: the same place in another CTA of the cluster */
    EACH if (ON(l)) {
        uint64_t address = a[1] == 64 ? u64(w, a[2])[l] : u32(w, a[2])[l];
        uint32_t rank = u32(w, a[3])[l];
        if (rank >= (uint32_t)m->n_ctas) fault(m, "out of bounds", 1u << l, "mapa names CTA rank %u of a cluster of %d", rank, m->n_ctas);
        uint64_t r = (address & ~0xff000000ull) | (uint64_t)rank << 24;
        if (a[1] == 64) ((uint64_t *)(w->registers + a[0]))[l] = r;
        else ((uint32_t *)(w->registers + a[0]))[l] = (uint32_t)r;
    }
    return NEXT;
}
OP(getctarank) {                 /* d, bits, address */
    (void)m;
    EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = (uint32_t)(a[1] == 64 ? u64(w, a[2])[l] : u32(w, a[2])[l]) >> 24;
    return NEXT;
}
OP(isspace) {                    /* predicate, address, window */
    (void)m;
    lanes_t r = 0;
    EACH { uint64_t top = u64(w, a[1])[l] >> 56; r |= (lanes_t)(top == (uint64_t)a[2]) << l; }
    set_predicate(w, a[0], r, on);
    return NEXT;
}
