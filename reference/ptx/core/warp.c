/* What the lanes of a warp do together: shuffles, votes, elect, redux, match, and control flow. */
#include "machine.h"

/* The lanes named by a member mask must stand here together: those that have not arrived yet are waited for. */
#define GATHER(mask) do { lanes_t absent_ = (mask) & w->live & ~on; \
        if (absent_) { waiting(w, "lanes %08x of its warp at a .sync instruction", absent_); return BLOCK; } \
        } while (0)

static lanes_t member_mask(const Warp *w, int32_t o, lanes_t on) { return u32(w, o)[first_lane(on)]; }

OP(shfl) {                       /* d, predicate or -1, source, lane, clamp, mode (0 idx, 1 up, 2 down, 3 bfly), member mask */
    lanes_t members = member_mask(w, a[6], on), good = 0;
    GATHER(members);
    const uint32_t *x = u32(w, a[2]), *b = u32(w, a[3]), *c = u32(w, a[4]);
    uint32_t t[WARP];
    EACH if (ON(l)) {
        uint32_t lane = (uint32_t)l, bits = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        uint32_t limit = (lane & segment) | (clamp & ~segment), low = lane & segment;
        int32_t from;
        int valid;
        if (a[5] == 1) from = (int32_t)lane - (int32_t)bits, valid = from >= (int32_t)limit;
        else if (a[5] == 2) from = (int32_t)(lane + bits), valid = from <= (int32_t)limit;
        else if (a[5] == 3) from = (int32_t)(lane ^ bits), valid = from <= (int32_t)limit;
        else from = (int32_t)(low | (bits & ~segment)), valid = from <= (int32_t)limit;
        if (!valid) from = (int32_t)lane;
        if (!(on >> from & 1))
            fault(m, "shuffle", on, "shfl.sync: lane %d reads lane %d, which does not take part", l, from);
        t[l] = x[from];
        good |= (lanes_t)valid << l;
    }
    if (a[0] >= 0) EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = t[l];
    if (a[1] >= 0) set_predicate(w, a[1], good, on);
    return NEXT;
}

OP(elect) {                      /* d or -1, predicate, member mask: the lowest member leads */
    (void)m;
    lanes_t members = member_mask(w, a[2], on);
    GATHER(members);
    uint32_t leader = (uint32_t)first_lane(members & on);
    if (a[0] >= 0) EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = leader;
    set_predicate(w, a[1], 1u << leader, on);
    return NEXT;
}

OP(vote) {                       /* d, predicate, mode (0 all, 1 any, 2 uni, 3 ballot), member mask */
    (void)m;
    lanes_t members = member_mask(w, a[3], on), p;
    GATHER(members);
    p = predicate(w, a[1]) & members & on;
    lanes_t all = members & on;
    if (a[2] == 3) EACH { if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = p; }
    else set_predicate(w, a[0], (a[2] == 0 ? p == all : a[2] == 1 ? p != 0 : p == all || !p) ? ALL_LANES : 0, on);
    return NEXT;
}

OP(redux) {                      /* d, source, operation, member mask; 0 add 1 min.u 2 max.u 3 min.s 4 max.s 5 and 6 or 7 xor 8 min.f32 9 max.f32 */
    (void)m;
    lanes_t members = member_mask(w, a[3], on);
    GATHER(members);
    const uint32_t *x = u32(w, a[1]);
    uint32_t r = 0;
    int first = 1;
    EACH if (ON(l)) {
        uint32_t v = x[l];
        float f, g;
        memcpy(&f, &v, 4), memcpy(&g, &r, 4);
        if (first) r = v, first = 0;
        else switch (a[2]) {
        case 0: r += v; break;
        case 1: r = v < r ? v : r; break;
        case 2: r = v > r ? v : r; break;
        case 3: r = (int32_t)v < (int32_t)r ? v : r; break;
        case 4: r = (int32_t)v > (int32_t)r ? v : r; break;
        case 5: r &= v; break;
        case 6: r |= v; break;
        case 7: r ^= v; break;
        case 8: r = f < g || g != g ? v : r; break;
        default: r = f > g || g != g ? v : r;
        }
    }
    EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = r;
    return NEXT;
}

OP(match_any) {                  /* d, source, member mask */
    (void)m;
    lanes_t members = member_mask(w, a[2], on);
    GATHER(members);
    const uint32_t *x = u32(w, a[1]);
    uint32_t t[WARP] = {0};
    EACH if (ON(l)) for (int k = 0; k < WARP; k++) if (on >> k & 1 && x[k] == x[l]) t[l] |= 1u << k;
    EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = t[l];
    return NEXT;
}

OP(warpsync) {                   /* bar.warp.sync */
    (void)m;
    lanes_t members = member_mask(w, a[0], on);
    GATHER(members);
    lanes_meet(w);
    return NEXT;
}

OP(activemask) { (void)m; EACH if (ON(l)) ((uint32_t *)(w->registers + a[0]))[l] = on; return NEXT; }
OP(nothing) { (void)m; (void)w; (void)a; (void)on; return NEXT; }
OP(trap) { (void)a; fault(m, "trap", on, "the kernel executed a trap"); }
