/* Tensor cores: operand types, matrix descriptors, the arithmetic of an accumulation; wgmma, mma.sync, ldmatrix, stmatrix. */
#include "machine.h"
#include <math.h>

/* ---- elements ---- */
int element_size(element_t type) { return type == TF32 ? 4 : type == E4M3 || type == E5M2 ? 1 : 2; }

static inline float of_bits(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}
static inline uint32_t bits_of(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
static inline float bf16_value(uint32_t bits) { return of_bits(bits << 16); }
static inline float tf32_value(uint32_t bits) { return of_bits(bits & 0xffffe000u); }      /* the low 13 bits are not read */
static inline float fp16_value(uint32_t bits) {
    uint32_t b = (bits & 0x7fff) << 13, finite = bits_of(of_bits(b) * 0x1p112f);           /* exact, subnormals too */
    return of_bits((b >= 0x0f800000u ? b | 0x7f800000u : finite) | (bits & 0x8000) << 16);
}

float element_value(element_t type, uint32_t bits) {
    float f;
    int e, m;
    switch (type) {
    case BF16: return bf16_value(bits);
    case TF32: return tf32_value(bits);
    case FP16: return fp16_value(bits);
    case E4M3:
        e = bits >> 3 & 15, m = bits & 7;
        f = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
        return bits & 0x80 ? -f : f;
    default:
        e = bits >> 2 & 31, m = bits & 3;
        f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(4 + m, e - 17) : ldexpf(m, -16);
        return bits & 0x80 ? -f : f;
    }
}

/* 16 bytes, or fewer, of elements that lie side by side. */
static void element_values(element_t type, const uint8_t *p, int n, float *to) {
    if (element_size(type) == 2) {
        uint16_t bits[8];
        memcpy(bits, p, (size_t)n * 2);
        if (type == BF16) for (int e = 0; e < n; e++) to[e] = bf16_value(bits[e]);
        else for (int e = 0; e < n; e++) to[e] = fp16_value(bits[e]);
    } else if (type == TF32) {
        uint32_t bits[4];
        memcpy(bits, p, (size_t)n * 4);
        for (int e = 0; e < n; e++) to[e] = tf32_value(bits[e]);
    } else for (int e = 0; e < n; e++) to[e] = element_value(type, p[e]);
}

int count_of(element_t type) { return type == BF16 ? COUNT_MMA_BF16 : type == FP16 ? COUNT_MMA_FP16 : type == TF32 ? COUNT_MMA_TF32 : COUNT_MMA_FP8; }

/* ---- descriptors ---- */
/* 32-, 64- and 128-byte swizzles: address bits 4 and up are exchanged with bits 7 and up. */
uint32_t swizzle(uint32_t address, uint32_t bits) { return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4); }

/* Where element (row, k) of an operand lies, before the swizzle, in bytes from the descriptor's start; row means m or n.
   Without a swizzle an operand is made of core matrices of 8 x 16 bytes; with one, of 8 rows of 32, 64 or 128 bytes.
   K-major: `stride` leads to the next 8 rows, `lead` (no swizzle only) to the next 16 bytes of k.
   MN-major: `lead` leads to the next 32, 64 or 128 bytes of rows and `stride` to the next 8 of k; without a swizzle the other way round. */
uint32_t matrix_offset(const MatrixDescriptor *d, int k_major, int size, int row, int k) {
    uint32_t span = 16u << d->swizzle_bits;
    if (k_major) {
        uint32_t kb = (uint32_t)(k * size), r = (uint32_t)row;
        return r % 8 * span + r / 8 * d->stride + (d->swizzle_bits ? kb : kb % 16 + kb / 16 * d->lead);
    }
    uint32_t rb = (uint32_t)(row * size), kk = (uint32_t)k, next_rows = d->swizzle_bits ? d->lead : d->stride, next_k = d->swizzle_bits ? d->stride : d->lead;
    return rb % span + rb / span * next_rows + kk % 8 * span + kk / 8 * next_k;
}

/* Decodes rows [row0, row0 + rows) x k elements of an operand in shared memory to floats, k fastest. */
void load_matrix(Machine *m, Warp *w, Cta *cta, const MatrixDescriptor *d, int k_major, element_t type, int row0, int rows, int k, float *to, Access access) {
    int size = element_size(type), step = k_major ? (16 / size < k ? 16 / size : k) : 1, run = k_major ? 1 : 16 / size;
    if (!k_major && rows % run) run = 8 / size < 1 ? 1 : 8 / size;
    uint32_t end = SHARED_BASE + m->static_shared + m->dynamic_shared;
    /* 16 contiguous bytes at a time: along k (K-major) or along the rows (MN-major) */
    for (int r = 0; r < rows; r += run)
        for (int i = 0; i < k; i += step) {
            uint32_t at = swizzle(d->start + matrix_offset(d, k_major, size, row0 + r, i), d->swizzle_bits), n = (uint32_t)(step * run * size);
            if (at < SHARED_BASE || at + n > end)
                fault(m, "out of bounds", 0, "a matrix operand reads shared address %u (row %d, k %d); the CTA has %u to %u", at, row0 + r, i, SHARED_BASE, end);
            touch_shared(m, w, cta, at, n, access);
            uint8_t written = cta->tile_swizzle[at / 16];
            if (m->strict && written && written != d->swizzle_bits + 1)
                finding(m, "swizzle mismatch", -1, 0, "a descriptor with a %u-byte swizzle reads what a tensor copy wrote with a %u-byte one (16: none), at shared address %u",
                        16u << d->swizzle_bits, 16u << (written - 1), at);
            float values[16];
            element_values(type, cta->shared + at, step * run, k_major ? to + r * k + i : values);
            if (!k_major) for (int e = 0; e < run; e++) to[(r + e) * k + i] = values[e];
        }
}

/* ---- arithmetic ---- */
enum { NO_EXPONENT = -1000, ODD_EXPONENT = 10000, GUARD_BITS = 2, LEAST_EXPONENT = -133 };

/* The exponents that the alignment sees: subnormals have that of the smallest normal, zero none. */
void exponents(element_t type, const float *x, int count, int *to) {
    int least = type == FP16 || type == E5M2 ? -14 : type == E4M3 ? -6 : -126;
    for (int i = 0; i < count; i++) {
        uint32_t b;
        memcpy(&b, x + i, 4);
        int e = (int)(b >> 23 & 255) - 127;
        to[i] = !(b << 1) ? NO_EXPONENT : e == 128 ? ODD_EXPONENT : e < least ? least : e;
    }
}

/* Four at a time: k is a multiple of 4 everywhere. */
enum { FOUR = 4 };
typedef float floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(16), aligned(4), may_alias));
typedef double doubles __attribute__((vector_size(32)));
typedef int64_t longs __attribute__((vector_size(32)));

/* c + a . b as a tensor core adds, bit for bit on an H200 (tests/ptx/accumulation.py): products are exact and not normalised, so the exponent of
   one is the sum of its factors'. All products and the accumulator are cut toward zero GUARD_BITS below the last bit of an fp32 with
   the largest exponent among them (LEAST_EXPONENT if that is less) and added exactly; the sum is cut toward zero to fp32. */
static inline __attribute__((always_inline)) float add_products(const float *a, const int *ea, const float *b, const int *eb, float c, int k) {
    doubles product[32 / FOUR];
    ints most = {NO_EXPONENT, NO_EXPONENT, NO_EXPONENT, NO_EXPONENT};
    int largest;
    exponents(TF32, &c, 1, &largest);
    for (int i = 0; i < k / FOUR; i++) {
        ints e = ((const ints *)ea)[i] + ((const ints *)eb)[i], more = e > most;
        most = (e & more) | (most & ~more);
        product[i] = __builtin_convertvector(((const floats *)a)[i], doubles) * __builtin_convertvector(((const floats *)b)[i], doubles);
    }
    for (int i = 0; i < FOUR; i++) largest = most[i] > largest ? most[i] : largest;
    if (largest > ODD_EXPONENT / 2 || largest < NO_EXPONENT / 2) {     /* infinities and NaN, or nothing but zeros */
        double sum = c;
        for (int i = 0; i < k; i++) sum += product[i / FOUR][i % FOUR];
        float f = (float)sum;
        uint32_t nan = 0x7fffffff;
        if (f != f) memcpy(&f, &nan, 4);
        return f;
    }
    int shift = 23 + GUARD_BITS - (largest < LEAST_EXPONENT ? LEAST_EXPONENT : largest);
    uint64_t up = (uint64_t)(1023 + shift) << 52, down = (uint64_t)(1023 - shift) << 52;
    double scale, unscale;
    memcpy(&scale, &up, 8), memcpy(&unscale, &down, 8);
    longs sum = {(int32_t)((double)c * scale)};         /* below 2^28 each; the conversion cuts */
    for (int i = 0; i < k / FOUR; i++) sum += __builtin_convertvector(__builtin_convertvector(product[i] * scale, ints), longs);
    int64_t total = sum[0] + sum[1] + sum[2] + sum[3];
    uint64_t magnitude = total < 0 ? (uint64_t)-total : (uint64_t)total;
    int extra = magnitude ? 64 - __builtin_clzll(magnitude) - 24 : 0;
    if (extra < shift - 149) extra = shift - 149;       /* a subnormal's last bit */
    if (extra > 0) magnitude = magnitude >> extra << extra;
    float f = (float)((double)magnitude * unscale);
    return total < 0 ? -f : f;
}

/* n outputs of k products each; b and its exponents hold k values an output. */
void accumulate(const float *a, const int *ea, const float *b, const int *eb, const float *c, float *d, int n, int k) {
    if (k == 16) for (int j = 0; j < n; j++) d[j] = add_products(a, ea, b + j * 16, eb + j * 16, c[j], 16);
    else if (k == 8) for (int j = 0; j < n; j++) d[j] = add_products(a, ea, b + j * 8, eb + j * 8, c[j], 8);
    else for (int j = 0; j < n; j++) d[j] = add_products(a, ea, b + j * k, eb + j * k, c[j], k);
}

/* ---- wgmma ---- */
static MatrixDescriptor hopper_descriptor(Machine *m, uint64_t v) {
    static const uint32_t swizzles[] = {0, 3, 2, 1};
    if (v >> 49 & 7) fault(m, "not implemented", 0, "a matrix descriptor with a base offset");
    return (MatrixDescriptor){(uint32_t)(v & 0x3fff) << 4, (uint32_t)(v >> 16 & 0x3fff) << 4, (uint32_t)(v >> 32 & 0x3fff) << 4, swizzles[v >> 62]};
}

static void use_register(Warp *w, int32_t number, uint32_t tag) {
    if (!w->busy[number]) w->busy_registers++;
    w->busy[number] = tag;
}

OP(wgmma_fence) { (void)m, (void)a, (void)on; w->wgmma_fence = w->steps + 1; return NEXT; }
OP(wgmma_commit) { (void)m, (void)a, (void)on; w->wgmma.committed++; w->wgmma.open = 0; return NEXT; }
OP(wgmma_wait) {                 /* all but the last a[0] groups are done */
    uint32_t upto = w->wgmma.committed > (uint32_t)a[0] ? w->wgmma.committed - (uint32_t)a[0] : 0;
    if (upto > w->wgmma.waited) w->wgmma.waited = upto;
    w->clock.done[agent(w, AGENT_WGMMA)] = w->wgmma.waited;
    for (int i = 0; i < m->n_registers && w->busy_registers; i++)
        if (w->busy[i] && !(w->busy[i] >> 31) && w->busy[i] <= w->wgmma.waited) w->busy[i] = 0, w->busy_registers--;
    return NEXT;
}

/* a = n, type of a, of b, negate a, negate b, transpose a, transpose b, scale-d predicate, b descriptor, registers of a (0: descriptor),
   registers of d, a, d, then the numbers of those registers. A warp computes its own 16 of the warpgroup's 64 rows. */
OP(wgmma) {
    int n = a[0], a_regs = a[9], d_regs = a[10], k = 32 / element_size((element_t)a[1]);
    element_t ta = (element_t)a[1], tb = (element_t)a[2];
    static float A[16 * 32], B[256 * 32], C[256], D[256];
    static int EA[16 * 32], EB[256 * 32];
    const int32_t *a_at = a + 11, *d_at = a + 11 + (a_regs ? a_regs : 1), *numbers = d_at + d_regs;
    Access access = async_access(w, agent(w, AGENT_WGMMA), w->wgmma.committed + 1, READ);
    int first = (w->index & 3) * 16, scale_d = predicate(w, a[7]) & 1;
    /* registers must be fenced after ordinary writes */
    if (m->strict && !w->wgmma_fence) finding(m, "missing wgmma.fence", -1, 0, "the warp's first wgmma follows no wgmma.fence");
    else if (m->strict) {
        for (int i = 0; i < a_regs + d_regs; i++) {
            uint32_t number = (uint32_t)numbers[i];
            if (w->stamp[number] >= w->wgmma_fence && !w->busy[number] && (i < a_regs || scale_d)) {
                finding(m, "missing wgmma.fence", -1, 0, "wgmma uses a register written since the last wgmma.fence of this warp");
                break;
            }
        }
    }
    if (a_regs) {                /* the layout of mma.sync: lane = row % 8 * 4 + column pair; registers: rows +8, then columns +8 */
        int per = 4 / element_size(ta);
        EACH for (int r = 0; r < a_regs; r++) for (int e = 0; e < per; e++) {
            int row = l / 4 + (r & 1) * 8, column = (l % 4 + (r >> 1) * 4) * per + e;
            uint32_t bits = u32(w, a_at[r])[l];
            A[row * k + column] = element_value(ta, element_size(ta) == 4 ? bits : bits >> (8 * element_size(ta) * e));
        }
    } else {
        MatrixDescriptor d = hopper_descriptor(m, u64(w, a_at[0])[0]);
        load_matrix(m, w, w->cta, &d, !a[5], ta, first, 16, k, A, access);
    }
    MatrixDescriptor d = hopper_descriptor(m, u64(w, a[8])[0]);
    load_matrix(m, w, w->cta, &d, !a[6], tb, 0, n, k, B, access);
    if (a[3]) for (int i = 0; i < 16 * k; i++) A[i] = -A[i];
    if (a[4]) for (int i = 0; i < n * k; i++) B[i] = -B[i];
    exponents(ta, A, 16 * k, EA), exponents(tb, B, n * k, EB);
    for (int row = 0; row < 16; row++) {
        for (int j = 0; j < n; j++) {
            int r = j / 8 * 4 + (row >> 3) * 2 + (j & 1), l = row % 8 * 4 + j % 8 / 2;
            C[j] = scale_d ? ((const float *)(w->registers + d_at[r]))[l] : 0;
        }
        accumulate(A + row * k, EA + row * k, B, EB, C, D, n, k);
        for (int j = 0; j < n; j++) {
            int r = j / 8 * 4 + (row >> 3) * 2 + (j & 1), l = row % 8 * 4 + j % 8 / 2;
            ((float *)(w->registers + d_at[r]))[l] = D[j];
        }
    }
    for (int i = 0; i < a_regs + d_regs; i++) use_register(w, numbers[i], w->wgmma.committed + 1);
    w->wgmma.open = 1;
    m->counts[count_of(ta)] += 2ull * 16 * (uint64_t)n * (uint64_t)k;
    return NEXT;
}

/* ---- mma.sync m16n8 ---- */
/* a = k, type of a, of b, d (4), c (4), registers of a, a, registers of b, b */
OP(mma_sync) {
    int k = a[0], na = a[11], nb = a[12 + na];
    element_t ta = (element_t)a[1], tb = (element_t)a[2];
    const int32_t *d_at = a + 3, *c_at = a + 7, *a_at = a + 12, *b_at = a + 13 + na;
    float A[16 * 32], B[8 * 32], C[8], D[16][8];
    int EA[16 * 32], EB[8 * 32];
    int per = 4 / element_size(ta);
    if (on != ALL_LANES) fault(m, "diverged", on, "mma.sync with lanes %08x", on);
    EACH {
        for (int r = 0; r < na; r++) for (int e = 0; e < per; e++)
            A[(l / 4 + (r & 1) * 8) * k + (l % 4 + (r >> 1) * 4) * per + e] = element_value(ta, per == 1 ? u32(w, a_at[r])[l] : u32(w, a_at[r])[l] >> (32 / per * e));
        for (int r = 0; r < nb; r++) for (int e = 0; e < per; e++)
            B[l / 4 * k + (l % 4 + r * 4) * per + e] = element_value(tb, per == 1 ? u32(w, b_at[r])[l] : u32(w, b_at[r])[l] >> (32 / per * e));
    }
    exponents(ta, A, 16 * k, EA), exponents(tb, B, 8 * k, EB);
    for (int row = 0; row < 16; row++) {
        for (int j = 0; j < 8; j++) C[j] = ((const float *)operand(w, c_at[(row >> 3) * 2 + (j & 1)]))[row % 8 * 4 + j / 2];
        accumulate(A + row * k, EA + row * k, B, EB, C, D[row], 8, k);
    }
    EACH for (int r = 0; r < 4; r++) ((float *)(w->registers + d_at[r]))[l] = D[l / 4 + (r >> 1) * 8][l % 4 * 2 + (r & 1)];
    m->counts[count_of(ta)] += 2ull * 16 * 8 * (uint64_t)k;
    return NEXT;
}

/* ---- ldmatrix, stmatrix: lanes 8 i to 8 i + 7 hold the addresses of matrix i's rows of 16 bytes ---- */
/* a = matrices, transposed, address (3), registers */
OP(ldmatrix) {
    uint16_t cell[4][8][8];
    for (int i = 0; i < a[0]; i++) for (int row = 0; row < 8; row++) {
        uint64_t address = effective_address(w, a + 2, 8 * i + row);
        memcpy(cell[i][row], any_at(m, w, 8 * i + row, SPACE_SHARED, address & ~SHARED_WINDOW, 16, READ), 16);
    }
    for (int i = 0; i < a[0]; i++) EACH {
        int r = l / 4, c = l % 4 * 2;
        uint32_t low = a[1] ? cell[i][c][r] : cell[i][r][c], high = a[1] ? cell[i][c + 1][r] : cell[i][r][c + 1];
        ((uint32_t *)(w->registers + a[5 + i]))[l] = low | high << 16;
    }
    m->counts[COUNT_SHARED_LOAD_BYTES] += 128ull * (uint64_t)a[0];
    return NEXT;
}
OP(stmatrix) {
    uint16_t cell[4][8][8];
    for (int i = 0; i < a[0]; i++) EACH {
        int r = l / 4, c = l % 4 * 2;
        uint32_t v = u32(w, a[5 + i])[l];
        if (a[1]) cell[i][c][r] = (uint16_t)v, cell[i][c + 1][r] = (uint16_t)(v >> 16);
        else cell[i][r][c] = (uint16_t)v, cell[i][r][c + 1] = (uint16_t)(v >> 16);
    }
    for (int i = 0; i < a[0]; i++) for (int row = 0; row < 8; row++) {
        uint64_t address = effective_address(w, a + 2, 8 * i + row);
        memcpy(any_at(m, w, 8 * i + row, SPACE_SHARED, address & ~SHARED_WINDOW, 16, WRITE), cell[i][row], 16);
    }
    m->counts[COUNT_SHARED_STORE_BYTES] += 128ull * (uint64_t)a[0];
    m->progress++;
    return NEXT;
}
