/* Registers and arithmetic: every instruction that computes lane by lane. Integer and predicate logic first, then floating point,
   then conversions. Results are computed for all 32 lanes and kept where the lane is on. */
#include "machine.h"
#include <fenv.h>
#include <math.h>

#define PUT(T, o, t) do { T *d_ = (T *)(w->registers + (o)); \
        if (on == ALL_LANES) memcpy(d_, t, sizeof t); else EACH if (ON(l)) d_[l] = t[l]; } while (0)

#define UNARY(name, D, S, expr) OP(name) { (void)m; const S *x_ = operand(w, a[1]); D t[WARP]; \
        EACH { S x = x_[l]; t[l] = (D)(expr); } PUT(D, a[0], t); return NEXT; }
#define BINARY(name, D, S, expr) OP(name) { (void)m; const S *x_ = operand(w, a[1]), *y_ = operand(w, a[2]); D t[WARP]; \
        EACH { S x = x_[l], y = y_[l]; t[l] = (D)(expr); } PUT(D, a[0], t); return NEXT; }
#define SHIFT(name, T, expr) OP(name) { (void)m; const T *x_ = operand(w, a[1]); const uint32_t *y_ = operand(w, a[2]); T t[WARP]; \
        EACH { T x = x_[l]; uint32_t y = y_[l]; t[l] = (T)(expr); } PUT(T, a[0], t); return NEXT; }
#define TERNARY(name, D, S, C, expr) OP(name) { (void)m; const S *x_ = operand(w, a[1]), *y_ = operand(w, a[2]); \
        const C *z_ = operand(w, a[3]); D t[WARP]; \
        EACH { S x = x_[l], y = y_[l]; C z = z_[l]; t[l] = (D)(expr); } PUT(D, a[0], t); return NEXT; }

#define MIN(x, y) ((x) < (y) ? (x) : (y))
#define MAX(x, y) ((x) > (y) ? (x) : (y))

/* ---- integers ---- */
#define INTEGER(U, S, bits) \
    UNARY(mov_u##bits, U, U, x) \
    UNARY(not_u##bits, U, U, ~x) \
    UNARY(neg_s##bits, U, U, 0 - x) \
    UNARY(abs_s##bits, U, S, x < 0 ? 0 - (U)x : (U)x) \
    UNARY(cnot_u##bits, U, U, x == 0) \
    BINARY(add_u##bits, U, U, x + y) \
    BINARY(sub_u##bits, U, U, x - y) \
    BINARY(mul_lo_u##bits, U, U, x * y) \
    BINARY(and_u##bits, U, U, x & y) \
    BINARY(or_u##bits, U, U, x | y) \
    BINARY(xor_u##bits, U, U, x ^ y) \
    BINARY(min_u##bits, U, U, MIN(x, y)) \
    BINARY(max_u##bits, U, U, MAX(x, y)) \
    BINARY(min_s##bits, S, S, MIN(x, y)) \
    BINARY(max_s##bits, S, S, MAX(x, y)) \
    BINARY(div_u##bits, U, U, y ? x / y : (U)-1) \
    BINARY(rem_u##bits, U, U, y ? x % y : x) \
    BINARY(div_s##bits, S, S, y == 0 ? -1 : y == -1 ? (S)(0 - (U)x) : x / y) \
    BINARY(rem_s##bits, S, S, y == 0 ? x : y == -1 ? 0 : x % y) \
    SHIFT(shl_u##bits, U, y >= bits ? 0 : x << y) \
    SHIFT(shr_u##bits, U, y >= bits ? 0 : x >> y) \
    SHIFT(shr_s##bits, S, x >> MIN(y, bits - 1)) \
    TERNARY(mad_lo_u##bits, U, U, U, x * y + z) \
    OP(selp_u##bits) { (void)m; const U *x = operand(w, a[1]), *y = operand(w, a[2]); lanes_t p = predicate(w, a[3]); U t[WARP]; \
        EACH t[l] = p >> l & 1 ? x[l] : y[l]; PUT(U, a[0], t); return NEXT; }

INTEGER(uint16_t, int16_t, 16)
INTEGER(uint32_t, int32_t, 32)
INTEGER(uint64_t, int64_t, 64)

BINARY(add_sat_s32, int32_t, int32_t, ({ int64_t s = (int64_t)x + y; MIN(MAX(s, INT32_MIN), INT32_MAX); }))
BINARY(sub_sat_s32, int32_t, int32_t, ({ int64_t s = (int64_t)x - y; MIN(MAX(s, INT32_MIN), INT32_MAX); }))
BINARY(mul_wide_u16, uint32_t, uint16_t, (uint32_t)x * y)
BINARY(mul_wide_s16, int32_t, int16_t, (int32_t)x * y)
BINARY(mul_wide_u32, uint64_t, uint32_t, (uint64_t)x * y)
BINARY(mul_wide_s32, int64_t, int32_t, (int64_t)x * y)
BINARY(mul_hi_u16, uint16_t, uint16_t, (uint32_t)x * y >> 16)
BINARY(mul_hi_s16, int16_t, int16_t, (int32_t)x * y >> 16)
BINARY(mul_hi_u32, uint32_t, uint32_t, (uint64_t)x * y >> 32)
BINARY(mul_hi_s32, int32_t, int32_t, (int64_t)x * y >> 32)
BINARY(mul_hi_u64, uint64_t, uint64_t, (unsigned __int128)x * y >> 64)
BINARY(mul_hi_s64, int64_t, int64_t, (__int128)x * y >> 64)
TERNARY(mad_wide_u16, uint32_t, uint16_t, uint32_t, (uint32_t)x * y + z)
TERNARY(mad_wide_s16, uint32_t, int16_t, uint32_t, (uint32_t)((int32_t)x * y) + z)
TERNARY(mad_wide_u32, uint64_t, uint32_t, uint64_t, (uint64_t)x * y + z)
TERNARY(mad_wide_s32, uint64_t, int32_t, uint64_t, (uint64_t)((int64_t)x * y) + z)
TERNARY(mad_hi_u32, uint32_t, uint32_t, uint32_t, (uint32_t)((uint64_t)x * y >> 32) + z)
TERNARY(mad_hi_s32, uint32_t, int32_t, uint32_t, (uint32_t)((int64_t)x * y >> 32) + z)
UNARY(popc_u32, uint32_t, uint32_t, __builtin_popcount(x))
UNARY(popc_u64, uint32_t, uint64_t, __builtin_popcountll(x))
UNARY(clz_u32, uint32_t, uint32_t, x ? __builtin_clz(x) : 32)
UNARY(clz_u64, uint32_t, uint64_t, x ? __builtin_clzll(x) : 64)
static uint32_t reverse(uint32_t x) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
UNARY(brev_u32, uint32_t, uint32_t, reverse(x))
UNARY(brev_u64, uint64_t, uint64_t, (uint64_t)reverse((uint32_t)x) << 32 | reverse((uint32_t)(x >> 32)))
UNARY(bfind_u32, uint32_t, uint32_t, x ? 31 - __builtin_clz(x) : 0xffffffffu)
UNARY(bfind_s32, uint32_t, int32_t, ({ uint32_t v = x < 0 ? ~(uint32_t)x : (uint32_t)x; v ? 31 - __builtin_clz(v) : 0xffffffffu; }))
UNARY(bfind_u64, uint32_t, uint64_t, x ? 63 - __builtin_clzll(x) : 0xffffffffu)

static uint64_t extract(uint64_t x, uint32_t position, uint32_t length, uint32_t bits, int is_signed) {
    position &= 255, length &= 255;
    if (!length) return 0;
    uint32_t sign_at = MIN(position + length - 1, bits - 1);
    uint64_t sign = is_signed ? x >> sign_at & 1 : 0, r = 0;
    for (uint32_t i = 0; i < bits; i++)
        r |= (i < length && position + i < bits ? x >> (position + i) & 1 : sign) << i;
    return r;
}
static uint64_t insert(uint64_t field, uint64_t base, uint32_t position, uint32_t length, uint32_t bits) {
    position &= 255, length &= 255;
    for (uint32_t i = 0; i < length && position + i < bits; i++)
        base = (base & ~(1ull << (position + i))) | (field >> i & 1) << (position + i);
    return base;
}
#define BITFIELD(T, bits) \
    OP(bfe_u##bits) { (void)m; const T *x = operand(w, a[1]); const uint32_t *p = u32(w, a[2]), *n = u32(w, a[3]); T t[WARP]; \
        EACH t[l] = (T)extract(x[l], p[l], n[l], bits, 0); PUT(T, a[0], t); return NEXT; } \
    OP(bfe_s##bits) { (void)m; const T *x = operand(w, a[1]); const uint32_t *p = u32(w, a[2]), *n = u32(w, a[3]); T t[WARP]; \
        EACH t[l] = (T)extract(x[l], p[l], n[l], bits, 1); PUT(T, a[0], t); return NEXT; } \
    OP(bfi_u##bits) { (void)m; const T *f = operand(w, a[1]), *b = operand(w, a[2]); const uint32_t *p = u32(w, a[3]), *n = u32(w, a[4]); \
        T t[WARP]; EACH t[l] = (T)insert(f[l], b[l], p[l], n[l], bits); PUT(T, a[0], t); return NEXT; }
BITFIELD(uint32_t, 32)
BITFIELD(uint64_t, 64)

OP(bmsk) {                       /* bmsk.{clamp,wrap}.b32 d, position, width */
    (void)m;
    const uint32_t *p = u32(w, a[1]), *n = u32(w, a[2]);
    uint32_t t[WARP];
    EACH {
        uint32_t position = a[3] ? p[l] & 31 : MIN(p[l], 32), length = a[3] ? n[l] & 31 : MIN(n[l], 32);
        uint64_t mask = ((1ull << length) - 1) << position;
        t[l] = (uint32_t)mask;
    }
    PUT(uint32_t, a[0], t);
    return NEXT;
}

OP(lop3) {
    (void)m;
    const uint32_t *x = u32(w, a[1]), *y = u32(w, a[2]), *z = u32(w, a[3]);
    uint32_t f = (uint32_t)a[4], t[WARP];
    EACH {
        uint32_t r = 0;
        if (f & 0x01) r |= ~x[l] & ~y[l] & ~z[l];
        if (f & 0x02) r |= ~x[l] & ~y[l] & z[l];
        if (f & 0x04) r |= ~x[l] & y[l] & ~z[l];
        if (f & 0x08) r |= ~x[l] & y[l] & z[l];
        if (f & 0x10) r |= x[l] & ~y[l] & ~z[l];
        if (f & 0x20) r |= x[l] & ~y[l] & z[l];
        if (f & 0x40) r |= x[l] & y[l] & ~z[l];
        if (f & 0x80) r |= x[l] & y[l] & z[l];
        t[l] = r;
    }
    PUT(uint32_t, a[0], t);
    return NEXT;
}

OP(prmt) {                       /* default mode: each nibble of the selector picks a byte of {b, a} or its sign */
    (void)m;
    const uint32_t *x = u32(w, a[1]), *y = u32(w, a[2]), *s = u32(w, a[3]);
    uint32_t t[WARP];
    EACH {
        uint64_t bytes = (uint64_t)y[l] << 32 | x[l];
        uint32_t r = 0;
        for (int i = 0; i < 4; i++) {
            uint32_t nibble = s[l] >> 4 * i, byte = (uint32_t)(bytes >> 8 * (nibble & 7)) & 255;
            if (nibble & 8) byte = byte & 128 ? 255 : 0;
            r |= byte << 8 * i;
        }
        t[l] = r;
    }
    PUT(uint32_t, a[0], t);
    return NEXT;
}

/* dp4a and dp2a: d = c + products of the bytes of b with the bytes, or (dp2a) the halves, of a.
   a = d, x, y, z, halves, first byte of y, x signed, y signed */
OP(dot) {
    (void)m;
    const uint32_t *x = u32(w, a[1]), *y = u32(w, a[2]), *z = u32(w, a[3]);
    uint32_t t[WARP];
    EACH {
        t[l] = z[l];
        for (int i = 0; i < (a[4] ? 2 : 4); i++) {
            uint32_t p = a[4] ? x[l] >> 16 * i & 0xffff : x[l] >> 8 * i & 0xff, q = y[l] >> 8 * (a[5] + i) & 0xff;
            if (a[6]) p = a[4] ? (uint32_t)(int16_t)p : (uint32_t)(int8_t)p;
            if (a[7]) q = (uint32_t)(int8_t)q;
            t[l] += p * q;
        }
    }
    PUT(uint32_t, a[0], t);
    return NEXT;
}

BINARY(mul24_lo_u32, uint32_t, uint32_t, (x & 0xffffff) * (y & 0xffffff))
TERNARY(sad_u32, uint32_t, uint32_t, uint32_t, (x > y ? x - y : y - x) + z)
TERNARY(sad_s32, uint32_t, int32_t, uint32_t, (x > y ? (uint32_t)x - (uint32_t)y : (uint32_t)y - (uint32_t)x) + z)

OP(shf) {                        /* funnel shift: a[4]: 0 left, 1 right; a[5]: 0 clamp, 1 wrap */
    (void)m;
    const uint32_t *lo = u32(w, a[1]), *hi = u32(w, a[2]), *c = u32(w, a[3]);
    uint32_t t[WARP];
    EACH {
        uint32_t n = a[5] ? c[l] & 31 : MIN(c[l], 32);
        uint64_t v = (uint64_t)hi[l] << 32 | lo[l];
        t[l] = a[4] ? (uint32_t)(v >> n) : (uint32_t)((n == 32 ? (uint64_t)lo[l] << 32 : v << n) >> 32);
    }
    PUT(uint32_t, a[0], t);
    return NEXT;
}

/* ---- predicates ---- */
OP(mov_pred) { (void)m; set_predicate(w, a[0], predicate(w, a[1]), on); return NEXT; }
OP(not_pred) { (void)m; set_predicate(w, a[0], ~predicate(w, a[1]), on); return NEXT; }
OP(and_pred) { (void)m; set_predicate(w, a[0], predicate(w, a[1]) & predicate(w, a[2]), on); return NEXT; }
OP(or_pred) { (void)m; set_predicate(w, a[0], predicate(w, a[1]) | predicate(w, a[2]), on); return NEXT; }
OP(xor_pred) { (void)m; set_predicate(w, a[0], predicate(w, a[1]) ^ predicate(w, a[2]), on); return NEXT; }

/* setp: a = d, negated d or -1, x, y, comparison, combination (0 none, 1 and, 2 or, 3 xor), predicate.
   Comparisons, in the instruction table's order: */
enum { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

static void put_comparison(Warp *w, const int32_t *a, lanes_t r, lanes_t on) {
    lanes_t c = a[5] ? predicate(w, a[6]) : 0, n = ~r;
    if (a[5] == 1) r &= c, n &= c;
    else if (a[5] == 2) r |= c, n |= c;
    else if (a[5] == 3) r ^= c, n ^= c;
    set_predicate(w, a[0], r, on);
    if (a[1] >= 0) set_predicate(w, a[1], n, on);
}

#define COMPARE(c) do { uint8_t t[WARP]; EACH t[l] = (c); EACH r |= (lanes_t)t[l] << l; } while (0)
#define SETP(name, T) OP(setp_##name) { (void)m; const T *x = operand(w, a[2]), *y = operand(w, a[3]); lanes_t r = 0; \
    switch (a[4]) { \
    case EQ: COMPARE(x[l] == y[l]); break; \
    case NE: COMPARE(x[l] != y[l]); break; \
    case LT: COMPARE(x[l] < y[l]); break; \
    case LE: COMPARE(x[l] <= y[l]); break; \
    case GT: COMPARE(x[l] > y[l]); break; \
    default: COMPARE(x[l] >= y[l]); break; } \
    put_comparison(w, a, r, on); return NEXT; }
SETP(u16, uint16_t) SETP(s16, int16_t) SETP(u32, uint32_t) SETP(s32, int32_t) SETP(u64, uint64_t) SETP(s64, int64_t)

static int compare(double x, double y, int c) {
    int nan = isnan(x) || isnan(y);
    switch (c) {
    case EQ: return !nan && x == y;
    case NE: return !nan && x != y;
    case LT: return !nan && x < y;
    case LE: return !nan && x <= y;
    case GT: return !nan && x > y;
    case GE: return !nan && x >= y;
    case EQU: return nan || x == y;
    case NEU: return nan || x != y;
    case LTU: return nan || x < y;
    case LEU: return nan || x <= y;
    case GTU: return nan || x > y;
    case GEU: return nan || x >= y;
    case NUM: return !nan;
    default: return nan;
    }
}

/* ---- floating point ---- */
/* flags of an instruction: bits 0-1 rounding (0 nearest even, 1 zero, 2 down, 3 up), 4 ftz, 8 sat, 16 NaN-propagating min/max, 32 relu */
enum { ROUNDING = 3, FTZ = 4, SAT = 8, NAN_WINS = 16, RELU = 32 };
static const int modes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

static inline float canonical(float x) {                 /* the one NaN that arithmetic returns */
    uint32_t bits = 0x7fffffff;
    float nan;
    memcpy(&nan, &bits, 4);
    return x != x ? nan : x;
}
static inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
static inline float saturate(float x) { return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }   /* NaN becomes 0 */
static inline float finish(float x, int flags) {
    if (flags & FTZ) x = flush(x);
    if (flags & SAT) x = saturate(x);
    return canonical(x);
}
static inline float start(float x, int flags) { return flags & FTZ ? flush(x) : x; }

static float minimum(float x, float y, int nan_wins) {
    if (isnan(x) || isnan(y)) return nan_wins ? NAN : isnan(x) ? y : x;
    return x == y ? (signbit(x) ? x : y) : x < y ? x : y;
}
static float maximum(float x, float y, int nan_wins) {
    if (isnan(x) || isnan(y)) return nan_wins ? NAN : isnan(x) ? y : x;
    return x == y ? (signbit(x) ? y : x) : x > y ? x : y;
}

#define F32_BINARY(name, expr) OP(name##_f32) { (void)m; const float *x_ = operand(w, a[1]), *y_ = operand(w, a[2]); float t[WARP]; int f = a[3]; \
    if (!f) EACH { float x = x_[l], y = y_[l]; t[l] = canonical(expr); } \
    else { if (f & ROUNDING) fesetround(modes[f & ROUNDING]); \
        EACH { float x = start(x_[l], f), y = start(y_[l], f); t[l] = finish(expr, f); } \
        if (f & ROUNDING) fesetround(FE_TONEAREST); } \
    PUT(float, a[0], t); return NEXT; }
F32_BINARY(add, x + y)
F32_BINARY(sub, x - y)
F32_BINARY(mul, x * y)
F32_BINARY(div, x / y)
F32_BINARY(min, minimum(x, y, f & NAN_WINS))
F32_BINARY(max, maximum(x, y, f & NAN_WINS))
BINARY(copysign_f32, uint32_t, uint32_t, (x & 0x80000000u) | (y & 0x7fffffffu))

/* a = d, x, y, z, flags, minus the product, minus z: a product and a sum that ptxas fuses */
OP(fused_f32) {
    (void)m;
    const float *x = operand(w, a[1]), *y = operand(w, a[2]), *z = operand(w, a[3]);
    float t[WARP];
    EACH t[l] = finish(fmaf(a[5] ? -start(x[l], a[4]) : start(x[l], a[4]), start(y[l], a[4]), a[6] ? -start(z[l], a[4]) : start(z[l], a[4])), a[4]);
    PUT(float, a[0], t);
    return NEXT;
}

OP(fma_f32) {
    (void)m;
    const float *x = operand(w, a[1]), *y = operand(w, a[2]), *z = operand(w, a[3]);
    float t[WARP];
    int f = a[4];
    if (!f) EACH t[l] = canonical(fmaf(x[l], y[l], z[l]));
    else {
        if (f & ROUNDING) fesetround(modes[f & ROUNDING]);
        EACH t[l] = finish(fmaf(start(x[l], f), start(y[l], f), start(z[l], f)), f);
        if (f & ROUNDING) fesetround(FE_TONEAREST);
    }
    PUT(float, a[0], t);
    return NEXT;
}

/* Three-input minimum and maximum (sm_100) */
OP(min3_f32) { (void)m; const float *x = operand(w, a[1]), *y = operand(w, a[2]), *z = operand(w, a[3]); float t[WARP]; int n = a[4] & NAN_WINS;
    EACH t[l] = finish(minimum(minimum(x[l], y[l], n), z[l], n), a[4]); PUT(float, a[0], t); return NEXT; }
OP(max3_f32) { (void)m; const float *x = operand(w, a[1]), *y = operand(w, a[2]), *z = operand(w, a[3]); float t[WARP]; int n = a[4] & NAN_WINS;
    EACH t[l] = finish(maximum(maximum(x[l], y[l], n), z[l], n), a[4]); PUT(float, a[0], t); return NEXT; }

UNARY(neg_f32, uint32_t, uint32_t, x ^ 0x80000000u)
UNARY(abs_f32, uint32_t, uint32_t, x & 0x7fffffffu)
UNARY(neg_f64, uint64_t, uint64_t, x ^ 0x8000000000000000ull)
UNARY(abs_f64, uint64_t, uint64_t, x & 0x7fffffffffffffffull)
OP(setp_f32) { (void)m; const float *x = operand(w, a[2]), *y = operand(w, a[3]); lanes_t r = 0;
    switch (a[4]) {
    case EQ: COMPARE(x[l] == y[l]); break;
    case LT: COMPARE(x[l] < y[l]); break;
    case LE: COMPARE(x[l] <= y[l]); break;
    case GT: COMPARE(x[l] > y[l]); break;
    case GE: COMPARE(x[l] >= y[l]); break;
    default: COMPARE(compare(x[l], y[l], a[4])); }
    put_comparison(w, a, r, on); return NEXT; }
OP(setp_f64) { (void)m; const double *x = operand(w, a[2]), *y = operand(w, a[3]); lanes_t r = 0;
    COMPARE(compare(x[l], y[l], a[4])); put_comparison(w, a, r, on); return NEXT; }

OP(testp_f32) {                  /* 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal, 5 subnormal */
    (void)m;
    const float *x = operand(w, a[1]);
    lanes_t r = 0;
    EACH {
        int c = fpclassify(x[l]);
        int yes = a[2] == 0 ? isfinite(x[l]) : a[2] == 1 ? c == FP_INFINITE : a[2] == 2 ? c != FP_NAN : a[2] == 3 ? c == FP_NAN
                : a[2] == 4 ? c == FP_NORMAL : c == FP_SUBNORMAL;
        r |= (lanes_t)yes << l;
    }
    set_predicate(w, a[0], r, on);
    return NEXT;
}

/* Approximate functions: the exact value rounded, or (option `approximate`) pushed off by the documented error, up or down by the bits of
   the argument: what a kernel computes must hold for either; or (option `functions`) whatever somebody else says. */
enum { ASK_EX2, ASK_LG2, ASK_RCP, ASK_SQRT, ASK_RSQRT, ASK_SIN, ASK_COS, ASK_TANH };   /* named in launch.py */

static float off(Machine *m, double exact, float argument, double relative, double absolute) {
    m->counts[COUNT_TRANSCENDENTALS]++;
    if (!m->approximate || !isfinite(exact)) return (float)exact;
    uint32_t bits;
    memcpy(&bits, &argument, 4);
    double direction = (int32_t)(bits * 0x9e3779b1u) * 0x1p-31;
    return (float)(exact + direction * (fabs(exact) * relative + absolute));
}
#define APPROXIMATE(name, number, expr, relative, absolute) OP(name##_approx_f32) { const float *x_ = operand(w, a[1]); float t[WARP]; \
    EACH if (ON(l)) { float s = start(x_[l], a[2]); double x = s; t[l] = finish(off(m, expr, s, relative, absolute), a[2]); } \
    if (m->ask) m->ask(number, !!(a[2] & FTZ), on, x_, t); \
    EACH if (ON(l)) ((float *)(w->registers + a[0]))[l] = t[l]; return NEXT; }
APPROXIMATE(ex2, ASK_EX2, exp2(x), 0x1p-22, 0)
APPROXIMATE(lg2, ASK_LG2, log2(x), 0, 0x1p-22)
APPROXIMATE(rcp, ASK_RCP, 1 / x, 0x1p-23, 0)
APPROXIMATE(sqrt, ASK_SQRT, sqrt(x), 0x1p-23, 0)
APPROXIMATE(rsqrt, ASK_RSQRT, 1 / sqrt(x), 0x1p-22, 0)
APPROXIMATE(sin, ASK_SIN, sin(x), 0, 0x1p-20)
APPROXIMATE(cos, ASK_COS, cos(x), 0, 0x1p-20)
APPROXIMATE(tanh, ASK_TANH, tanh(x), 0x1p-11, 0)
OP(div_approx_f32) {             /* div.full and div.approx */
    const float *x = operand(w, a[1]), *y = operand(w, a[2]);
    EACH if (ON(l)) ((float *)(w->registers + a[0]))[l] = finish(off(m, (double)start(x[l], a[3]) / start(y[l], a[3]), y[l], 0x1p-22, 0), a[3]);
    return NEXT;
}
OP(sqrt_f32) { (void)m; const float *x = operand(w, a[1]); float t[WARP]; if (a[2] & ROUNDING) fesetround(modes[a[2] & ROUNDING]);
    EACH t[l] = finish(sqrtf(start(x[l], a[2])), a[2]); fesetround(FE_TONEAREST); PUT(float, a[0], t); return NEXT; }
OP(rcp_f32) { (void)m; const float *x = operand(w, a[1]); float t[WARP]; if (a[2] & ROUNDING) fesetround(modes[a[2] & ROUNDING]);
    EACH t[l] = finish(1.0f / start(x[l], a[2]), a[2]); fesetround(FE_TONEAREST); PUT(float, a[0], t); return NEXT; }

/* Two floats in a 64-bit register (sm_100) */
#define F32X2(name, expr) OP(name##_f32x2) { (void)m; const float *x_ = operand(w, a[1]), *y_ = operand(w, a[2]), *z_ = operand(w, a[3]); \
    float t[2 * WARP]; int f = a[4]; (void)z_; if (f & ROUNDING) fesetround(modes[f & ROUNDING]); \
    for (int i = 0; i < 2 * WARP; i++) { float x = start(x_[i], f), y = start(y_[i], f), z = start(z_[i], f); (void)z; t[i] = finish(expr, f); } \
    if (f & ROUNDING) fesetround(FE_TONEAREST); \
    uint64_t u[WARP]; memcpy(u, t, sizeof t); PUT(uint64_t, a[0], u); return NEXT; }
F32X2(add, x + y)
F32X2(sub, x - y)
F32X2(mul, x * y)
F32X2(fma, fmaf(x, y, z))

/* Doubles */
#define F64_BINARY(name, expr) OP(name##_f64) { (void)m; const double *x_ = operand(w, a[1]), *y_ = operand(w, a[2]); double t[WARP]; \
    if (a[3] & ROUNDING) fesetround(modes[a[3] & ROUNDING]); \
    EACH { double x = x_[l], y = y_[l]; t[l] = expr; } fesetround(FE_TONEAREST); PUT(double, a[0], t); return NEXT; }
F64_BINARY(add, x + y)
F64_BINARY(sub, x - y)
F64_BINARY(mul, x * y)
F64_BINARY(div, x / y)
F64_BINARY(min, fmin(x, y))
F64_BINARY(max, fmax(x, y))
OP(fma_f64) { (void)m; const double *x = operand(w, a[1]), *y = operand(w, a[2]), *z = operand(w, a[3]); double t[WARP];
    EACH t[l] = fma(x[l], y[l], z[l]); PUT(double, a[0], t); return NEXT; }
OP(sqrt_f64) { (void)m; const double *x = operand(w, a[1]); double t[WARP]; EACH t[l] = sqrt(x[l]); PUT(double, a[0], t); return NEXT; }
OP(rcp_f64) { (void)m; const double *x = operand(w, a[1]); double t[WARP]; EACH t[l] = 1 / x[l]; PUT(double, a[0], t); return NEXT; }

/* ---- 16-bit floats: computed in double with one rounding ---- */
static double wide_f16(uint16_t h) {
    int e = h >> 10 & 31, f = h & 1023;
    double v = e == 31 ? (f ? NAN : INFINITY) : e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
    return h & 0x8000 ? -v : v;
}
static double wide_bf16(uint16_t h) {
    uint32_t b = (uint32_t)h << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}
/* Rounds to `bits` of mantissa (with the leading one) and a smallest exponent; mode as in the flags, 4: to nearest, ties away. */
static double round_to(double x, int bits, int e_min, int mode) {
    if (!isfinite(x) || x == 0) return x;
    int e;
    frexp(x, &e);
    e = MAX(e - 1, e_min);
    double q = ldexp(x, bits - 1 - e), r = mode == 0 ? nearbyint(q) : mode == 1 ? trunc(q) : mode == 2 ? floor(q) : mode == 3 ? ceil(q) : round(q);
    return copysign(ldexp(r, e - bits + 1), x);
}
static uint16_t narrow_f16(double x, int mode) {
    if (isnan(x)) return 0x7fff;
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    x = fabs(round_to(x, 11, -14, mode));
    if (x > 65504) return sign | (mode == 1 && isfinite(x) ? 0x7bff : 0x7c00);
    if (x < 0x1p-14) return sign | (uint16_t)ldexp(x, 24);
    int e;
    double f = frexp(x, &e);
    return sign | (uint16_t)(((e + 14) << 10) + (int)ldexp(f, 11) - 1024);
}
static uint16_t narrow_bf16(double x, int mode) {
    if (isnan(x)) return 0x7fff;
    double r = round_to(x, 8, -126, mode);
    if (fabs(r) > 0x1.fep127 && mode == 1 && isfinite(x)) return signbit(x) ? 0xff7f : 0x7f7f;
    float f = (float)r;
    uint32_t b;
    memcpy(&b, &f, 4);
    return (uint16_t)(b >> 16);
}
uint16_t half_bits(double x, int bf16) { return bf16 ? narrow_bf16(x, 0) : narrow_f16(x, 0); }

/* x*y + z with its last bit made sticky, so that a second rounding cannot go wrong */
static double fma_odd(double x, double y, double z) {
    double p = x * y, s = p + z;       /* the product of two 16-bit floats is exact */
    if (!isfinite(s)) return s;
    double b = s - p, error = (p - (s - b)) + (z - b);
    int64_t bits;
    memcpy(&bits, &s, 8);
    if (error != 0 && !(bits & 1)) {
        bits += (error > 0) == (s > 0) ? 1 : -1;
        memcpy(&s, &bits, 8);
    }
    return s;
}
#define HALF_OP(name, kind, expr) \
    OP(name##_##kind) { (void)m; const uint16_t *x_ = operand(w, a[1]), *y_ = operand(w, a[2]), *z_ = operand(w, a[3]); uint16_t t[WARP]; int f = a[4]; \
        EACH { double x = wide_##kind(x_[l]), y = wide_##kind(y_[l]), z = wide_##kind(z_[l]), r; (void)y; (void)z; r = expr; \
            if (f & SAT) r = r > 1 ? 1 : r > 0 ? r : 0; if (f & RELU) r = r > 0 ? r : isnan(r) ? r : 0; t[l] = narrow_##kind(r, 0); } \
        PUT(uint16_t, a[0], t); return NEXT; } \
    OP(name##_##kind##x2) { (void)m; const uint16_t *x_ = operand(w, a[1]), *y_ = operand(w, a[2]), *z_ = operand(w, a[3]); uint16_t t[2 * WARP]; int f = a[4]; \
        for (int i = 0; i < 2 * WARP; i++) { double x = wide_##kind(x_[i]), y = wide_##kind(y_[i]), z = wide_##kind(z_[i]), r; (void)y; (void)z; r = expr; \
            if (f & SAT) r = r > 1 ? 1 : r > 0 ? r : 0; if (f & RELU) r = r > 0 ? r : isnan(r) ? r : 0; t[i] = narrow_##kind(r, 0); } \
        uint32_t u[WARP]; memcpy(u, t, sizeof t); PUT(uint32_t, a[0], u); return NEXT; }
#define HALF(kind) \
    HALF_OP(add, kind, fma_odd(x, 1, y)) HALF_OP(sub, kind, fma_odd(x, 1, -y)) HALF_OP(mul, kind, x * y) HALF_OP(fma, kind, fma_odd(x, y, z)) \
    HALF_OP(min, kind, minimum((float)x, (float)y, f & NAN_WINS)) HALF_OP(max, kind, maximum((float)x, (float)y, f & NAN_WINS)) \
    HALF_OP(ex2, kind, exp2(x)) HALF_OP(tanh, kind, tanh(x)) \
    OP(setp_##kind) { (void)m; const uint16_t *x = operand(w, a[2]), *y = operand(w, a[3]); lanes_t r = 0; \
        COMPARE(compare(wide_##kind(x[l]), wide_##kind(y[l]), a[4])); put_comparison(w, a, r, on); return NEXT; }
HALF(f16)
HALF(bf16)
/* Mixed precision (sm_100): 16-bit operands widened, one fp32 operation. a = d, x, y, z, bf16, flags, operation (0 add, 1 sub, 2 fma);
   add and sub take x (16 bits) and z (fp32), fma x and y (16 bits) and z. */
OP(mixed) {
    (void)m;
    const uint16_t *x_ = operand(w, a[1]), *y_ = operand(w, a[2]);
    const float *z_ = operand(w, a[3]);
    float t[WARP];
    int f = a[5];
    if (f & ROUNDING) fesetround(modes[f & ROUNDING]);
    EACH {
        float x = (float)(a[4] ? wide_bf16(x_[l]) : wide_f16(x_[l])), y = (float)(a[4] ? wide_bf16(y_[l]) : wide_f16(y_[l])), z = z_[l];
        t[l] = finish(a[6] == 0 ? x + z : a[6] == 1 ? x - z : fmaf(x, y, z), f);
    }
    if (f & ROUNDING) fesetround(FE_TONEAREST);
    PUT(float, a[0], t);
    return NEXT;
}

UNARY(neg_half, uint16_t, uint16_t, x ^ 0x8000)
UNARY(abs_half, uint16_t, uint16_t, x & 0x7fff)
UNARY(neg_halfx2, uint32_t, uint32_t, x ^ 0x80008000u)
UNARY(abs_halfx2, uint32_t, uint32_t, x & 0x7fff7fffu)

/* ---- conversions ---- */
/* Types, in the instruction table's order */
enum { T_U8, T_U16, T_U32, T_U64, T_S8, T_S16, T_S32, T_S64, T_F16, T_BF16, T_F32, T_F64, T_TF32, T_E4M3, T_E5M2 };
static const int type_bits[] = {8, 16, 32, 64, 8, 16, 32, 64, 16, 16, 32, 64, 32, 8, 8};

static uint64_t raw(const Warp *w, int32_t o, int register_bits, int l) {
    const void *p = operand(w, o);
    return register_bits == 16 ? ((const uint16_t *)p)[l] : register_bits == 32 ? ((const uint32_t *)p)[l] : ((const uint64_t *)p)[l];
}
static void put_raw(Warp *w, int32_t o, int register_bits, int l, uint64_t v) {
    void *p = w->registers + o;
    if (register_bits == 16) ((uint16_t *)p)[l] = (uint16_t)v;
    else if (register_bits == 32) ((uint32_t *)p)[l] = (uint32_t)v;
    else ((uint64_t *)p)[l] = v;
}
static int64_t sign_extended(uint64_t v, int type) {
    int bits = type_bits[type];
    if (bits == 64) return (int64_t)v;
    v &= (1ull << bits) - 1;
    return type >= T_S8 && type <= T_S64 && v >> (bits - 1) ? (int64_t)(v | ~0ull << bits) : (int64_t)v;
}
static int64_t clamp_to(__int128 v, int type) {
    int bits = type_bits[type], s = type >= T_S8;
    __int128 low = s ? -((__int128)1 << (bits - 1)) : 0, high = ((__int128)1 << (s ? bits - 1 : bits)) - 1;
    return (int64_t)(v < low ? low : v > high ? high : v);
}
static long double widen(uint64_t v, int type) {             /* exact */
    float f;
    double d;
    uint32_t b = (uint32_t)v;
    switch (type) {
    case T_F16: return wide_f16((uint16_t)v);
    case T_BF16: return wide_bf16((uint16_t)v);
    case T_F32: case T_TF32: memcpy(&f, &b, 4); return f;
    case T_F64: memcpy(&d, &v, 8); return d;
    case T_E4M3: case T_E5M2: return element_value(type == T_E4M3 ? E4M3 : E5M2, b & 255);
    case T_U64: return v;
    default: return sign_extended(v, type);
    }
}
static uint64_t narrow(long double x, int type, int mode) {  /* to a floating-point type */
    float f;
    double d;
    uint32_t b;
    uint64_t v;
    if (mode && mode < 4) fesetround(modes[mode]);
    f = (float)x, d = (double)x;
    fesetround(FE_TONEAREST);
    switch (type) {
    case T_F16: return narrow_f16((double)x, mode);
    case T_BF16: return narrow_bf16((double)x, mode);
    case T_TF32: f = (float)round_to((double)x, 11, -126, mode); __attribute__((fallthrough));
    case T_F32: f = canonical(f); memcpy(&b, &f, 4); return b;
    default: memcpy(&v, &d, 8); return v;
    }
}

/* cvt: a = d, x, destination type, source type, destination register bits, source register bits, flags, integer rounding (-1: none), ties away */
OP(cvt) {
    (void)m;
    int to = a[2], from = a[3], flags = a[6], integer_mode = a[7], mode = a[8] ? 4 : flags & ROUNDING;
    EACH if (ON(l)) {
        uint64_t v = raw(w, a[1], a[5], l), r;
        if (from <= T_S64 && to <= T_S64) {
            __int128 x = from == T_U64 ? (__int128)v : sign_extended(v, from);
            r = flags & SAT ? (uint64_t)clamp_to(x, to) : (uint64_t)x;
            r = (uint64_t)sign_extended(r, to);
        } else {
            long double x = widen(v, from);
            if (flags & FTZ && from == T_F32 && fabsl(x) < 0x1p-126L) x = copysignl(0, x);
            if (integer_mode >= 0) {
                if (integer_mode == 0) x = nearbyintl(x);
                else x = integer_mode == 1 ? truncl(x) : integer_mode == 2 ? floorl(x) : ceill(x);
            }
            if (to <= T_S64) {       /* out of range: the nearest representable; NaN: 0 for 32 bits and less, the sign bit alone for 64 */
                if (isnan(x)) r = to == T_S64 || to == T_U64 ? 1ull << 63 : 0;
                else r = (uint64_t)(x >= 0x1p65L ? clamp_to((__int128)1 << 66, to) : x <= -0x1p65L ? clamp_to(-((__int128)1 << 66), to) : clamp_to((__int128)x, to));
            } else {
                if (flags & SAT) x = x > 1 ? 1 : x > 0 ? x : 0;
                if (flags & RELU && x < 0) x = 0;
                r = narrow(x, to, mode);
                if (flags & FTZ && to == T_F32 && !(r & 0x7f800000)) r &= 0x80000000u;
            }
        }
        put_raw(w, a[0], a[4], l, r);
    }
    return NEXT;
}

static inline uint32_t bf16_nearest(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return f != f ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
OP(cvt_bf16_f32) { (void)m; const float *x = operand(w, a[1]); uint16_t t[WARP];      /* nearest even */
    EACH t[l] = (uint16_t)bf16_nearest(x[l]); PUT(uint16_t, a[0], t); return NEXT; }
OP(cvt_bf16x2_f32) { (void)m; const float *x = operand(w, a[1]), *y = operand(w, a[2]); uint32_t t[WARP];
    EACH t[l] = bf16_nearest(x[l]) << 16 | bf16_nearest(y[l]); PUT(uint32_t, a[0], t); return NEXT; }
UNARY(cvt_f32_bf16, uint32_t, uint16_t, (uint32_t)x << 16)
OP(cvt_x2_f32) {                 /* a = d, high, low, type, flags */
    (void)m;
    const float *x = operand(w, a[1]), *y = operand(w, a[2]);
    EACH if (ON(l)) {
        float high = x[l], low = y[l];
        if (a[4] & RELU) high = high < 0 ? 0 : high, low = low < 0 ? 0 : low;
        ((uint32_t *)(w->registers + a[0]))[l] = (uint32_t)narrow(high, a[3], a[4] & ROUNDING) << 16 | (uint32_t)narrow(low, a[3], a[4] & ROUNDING);
    }
    return NEXT;
}

/* ---- moves that split and join ---- */
OP(pack) {                       /* d, destination bits, parts, part bits, the parts from low to high */
    (void)m;
    EACH if (ON(l)) {
        uint64_t v = 0;
        for (int i = 0; i < a[2]; i++) v |= raw(w, a[4 + i], a[3], l) << (a[3] * i);
        put_raw(w, a[0], a[1], l, v);
    }
    return NEXT;
}
OP(unpack) {                     /* source, source bits, parts, part bits, the parts from low to high (-1: not wanted) */
    (void)m;
    uint64_t v[WARP];
    EACH v[l] = raw(w, a[0], a[1], l);
    for (int i = 0; i < a[2]; i++)
        if (a[4 + i] >= 0) EACH if (ON(l)) put_raw(w, a[4 + i], a[3], l, v[l] >> (a[3] * i));
    return NEXT;
}

OP(special) {                    /* mov from a special register: d, register bits, which */
    Cta *c = w->cta;
    EACH if (ON(l)) {
        uint32_t thread = (uint32_t)w->index * WARP + (uint32_t)l, x = m->block[0], y = m->block[1];
        uint64_t v;
        switch (a[2]) {
        case 0: v = thread % x; break;
        case 1: v = thread / x % y; break;
        case 2: v = thread / (x * y); break;
        case 3: case 4: case 5: v = m->block[a[2] - 3]; break;
        case 6: case 7: case 8: v = c->id[a[2] - 6]; break;
        case 9: case 10: case 11: v = m->grid[a[2] - 9]; break;
        case 12: v = (uint64_t)l; break;
        case 13: v = (uint64_t)w->index; break;
        case 14: case 15: case 16: v = c->id[a[2] - 14] % m->cluster[a[2] - 14]; break;    /* %cluster_ctaid */
        case 17: case 18: case 19: v = m->cluster[a[2] - 17]; break;                       /* %cluster_nctaid */
        case 20: case 21: case 22: v = c->id[a[2] - 20] / m->cluster[a[2] - 20]; break;    /* %clusterid */
        case 23: case 24: case 25: v = m->grid[a[2] - 23] / m->cluster[a[2] - 23]; break;  /* %nclusterid */
        case 26: v = c->rank; break;
        case 27: v = (uint64_t)m->n_ctas; break;
        case 28: v = (1u << l) - 1; break;                                                 /* %lanemask_lt */
        case 29: v = (2u << l) - 1; break;
        case 30: v = ~((1u << l) - 1); break;                                              /* %lanemask_ge */
        case 31: v = l == 31 ? 0 : ~((2u << l) - 1); break;
        case 32: v = 1u << l; break;
        case 33: v = m->dynamic_shared; break;
        case 34: v = m->dynamic_shared + m->static_shared + SHARED_BASE; break;
        case 35: v = c->index % 132; break;                                                /* %smid */
        case 36: v = w->steps; break;                                                      /* clocks: instructions of this warp */
        case 37: v = 1; break;                                                             /* %is_explicit_cluster */
        case 38: v = WARP; break;
        case 39: v = (uint64_t)c->m->n_ctas ? (uint64_t)c->index : 0; break;
        default: v = 0;
        }
        put_raw(w, a[0], a[1], l, v);
    }
    return NEXT;
}
