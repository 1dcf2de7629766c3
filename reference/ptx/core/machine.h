/* The machine's parts and how they hold together.

   A launch runs cluster by cluster. A cluster is a set of CTAs that live at once; a CTA owns shared memory, mbarriers,
   named barriers, tensor memory and warps; a warp owns 32 lanes of registers and one or more fragments (groups of lanes
   that stand at the same instruction). Python has translated the PTX to an array of Insn; each Insn points at the C
   function that executes it for one fragment.

   Who may touch what, and in which order, is judged by vector clocks (order.c). */
#ifndef MACHINE_H
#define MACHINE_H
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

#define WARP 32
#define MAX_WARPS 32
#define SHARED_BASE 1024u        /* sm_90 and later keep the first KB of shared memory for the system */
#define SHARED_BYTES 233472u     /* 228 KB: what one SM has */
#define TMEM_LANES 128
#define TMEM_COLUMNS 512
#define ALL_LANES 0xffffffffu

typedef uint32_t lanes_t;        /* one bit per lane; also what a predicate register holds */

/* Agents: whoever reads and writes memory on its own. Each has a clock. A warp's clock ticks when it releases (arrives at a
   barrier); an asynchronous unit's clock is the number of the group, phase or operation that a wait can name. */
enum {
    AGENT_WARP = 0,                            /* a warp's own loads and stores */
    AGENT_BULK = AGENT_WARP + MAX_WARPS,       /* what bulk copies out of shared memory read, by bulk group of a warp */
    AGENT_BULK_WRITE = AGENT_BULK + MAX_WARPS, /* what they write to global memory: not done after a wait for their reads */
    AGENT_WGMMA = AGENT_BULK_WRITE + MAX_WARPS,      /* wgmma operand reads, by wgmma group of a warp */
    AGENT_TCGEN = AGENT_WGMMA + MAX_WARPS,     /* tcgen05.mma and .cp, by operation of the issuing warp */
    AGENT_CPASYNC = AGENT_TCGEN + MAX_WARPS,   /* cp.async, by group of a warp */
    AGENT_TMEM_LD = AGENT_CPASYNC + MAX_WARPS, /* tcgen05.ld, until tcgen05.wait::ld */
    AGENT_TMEM_ST = AGENT_TMEM_LD + MAX_WARPS, /* tcgen05.st, until tcgen05.wait::st */
    AGENT_MBARRIER = AGENT_TMEM_ST + MAX_WARPS,/* copies that complete on an mbarrier, by its phase */
    MAX_MBARRIERS = 96,
    AGENT_PREVIOUS_GRID = AGENT_MBARRIER + MAX_MBARRIERS,   /* the launch before, of a launch that may start early: known to be done at clock 1 */
    AGENTS                                     /* per CTA */
};

typedef enum { GENERIC, ASYNC } proxy_t;
typedef enum { READ, WRITE, ATOMIC } access_kind_t;

typedef struct {                 /* one access, as the order checks see it */
    uint32_t agent, clock;       /* agent: cluster rank * AGENTS + AGENT_... */
    int32_t pc;
    uint8_t proxy, kind;
} Access;

typedef struct {                 /* vector clocks, of `agents` entries each */
    uint32_t *done;              /* what is known to be done, */
    uint32_t *fenced[2];         /* what of it the async proxy may see in shared and in global memory, */
    uint32_t *covered;           /* and what tcgen05.fence::before_thread_sync has covered (sm_100) */
} Clock;

typedef enum { NEXT, JUMP, BLOCK } status_t;

typedef struct Machine Machine;
typedef struct Cta Cta;
typedef struct Warp Warp;
typedef struct Insn Insn;
typedef status_t (*Handler)(Machine *m, Warp *w, const int32_t *a, lanes_t on);

/* flags of an instruction */
enum { CONVERGENT = 1, CHAINS = 2, MOVES = 4 };   /* CHAINS: may use registers of a wgmma in flight; MOVES: copies registers and nothing else */

struct Insn {                    /* mirrored in program.py */
    Handler execute;
    const int32_t *args;         /* what the instruction table encoded: register offsets and plain integers */
    const int32_t *registers;    /* numbers of the registers it names, destinations first: for the asynchronous-use checks */
    int32_t n_registers, n_written;
    int32_t guard;               /* predicate operand, or -1 */
    int32_t flags;
    int32_t line, reserved;
};

typedef struct {                 /* 2 bytes of global memory in this launch; mirrored in launch.py */
    uint32_t history;            /* its accesses by the cluster that runs (order.c) */
    uint32_t writer;             /* 1 + the CTA that last wrote it, bit 31 set for atomics; 0: none */
    uint32_t reader;             /* 1 + a CTA that read it, SEVERAL if CTAs of several clusters did; 0: none */
    uint32_t lane;               /* which lane wrote it: see LaneTouch */
} Cell;
#define SEVERAL 0xffffffffu

typedef struct {                 /* a range of global memory that the launch may touch; mirrored in launch.py */
    uint64_t start, size;
    uint8_t *written;            /* one byte per byte of memory, nonzero where something wrote it; NULL: all of it counts as written */
    Cell *cells;                 /* NULL: who touches it is not checked */
    const Cell *previous;        /* those of the launch before, where this one may start before that one's end; else NULL */
} Allocation;

typedef struct {                 /* mirrored in launch.py */
    char kind[32], text[480];
    int32_t pc, other_pc, cta, warp;
    int64_t lanes;
    uint64_t times;
} Finding;
#define MAX_FINDINGS 64

typedef struct {
    uint32_t address, count, phase;   /* phase: completed phases */
    int32_t pending, live, init_pc;
    int64_t tx;
    uint32_t init_agent, init_clock;
    uint32_t copy_phase;              /* the last phase that a copy completes in, and where the copy was issued; 0: none */
    int32_t copy_pc;
    Clock arriving, completed;
    int32_t fenced;                   /* its initialisation is visible to the async proxy */
    uint32_t published;               /* the generation of the cluster's barrier that lets its initialisation be seen, by relaxed arrival; 0: none */
} Mbarrier;

typedef struct {                 /* a named barrier of a CTA, or the cluster's barrier */
    uint32_t expected, arrived, generation;
    Clock arriving, completed;
} Barrier;

typedef struct {                 /* lanes of a warp at one instruction */
    lanes_t lanes;
    int32_t pc;
    uint8_t blocked, arrived;    /* arrived: it stands in a barrier whose `generation` it waits to pass */
    uint32_t generation;
    int64_t waits_since;         /* the time-out tick at which the try_wait at this pc began to wait, or -1 */
    char why[160];               /* what a blocked fragment waits for */
} Fragment;

typedef struct { uint32_t write, read; } LaneTouch;   /* each: sync of the warp << 11 | many lanes << 10 | warp << 5 | lane; 0: nobody */
typedef struct { uint32_t committed, waited, open; } Groups;   /* counters of commit groups; open: operations since the last commit */

struct Warp {
    Cta *cta;
    int index;
    lanes_t live;                /* lanes that have not exited */
    Fragment fragments[WARP];
    int n_fragments, current;
    uint8_t *registers, *local;
    const uint8_t *constants;
    Clock clock;                 /* what any of its lanes knows */
    Clock base;                  /* while `split`: what all of its lanes know; those in `acquired` know what `clock` says */
    int split;
    lanes_t acquired;
    lanes_t on;                  /* lanes of the instruction that is executed */
    uint32_t touch_clock;        /* the warp's clock when one of its lanes last used memory */
    uint32_t *tcgen_after;       /* what tcgen05.fence::after_thread_sync has let later tcgen05 operations rely on (sm_100) */
    uint64_t steps;
    Groups bulk, wgmma, cpasync;
    lanes_t bulk_lanes;          /* that issued bulk copies: their groups belong to a thread */
    uint32_t tmem_loads, tmem_stores, tcgen_ops;
    int tmem_open, tcgen_uncommitted;   /* tmem_open: bit 0 loads, bit 1 stores that were not waited for */
    int cluster_arrived;
    uint32_t cluster_generation;
    uint32_t fence_clock;        /* the warp's clock at its last memory fence; 0: none yet */
    int busy_registers;          /* how many registers an asynchronous instruction still uses */
    uint32_t *busy;              /* per register: 0, or the wgmma group (bit 31 clear) or tcgen05.ld (bit 31 set) that uses it */
    uint32_t *stamp;             /* per register: value of `steps` when an ordinary instruction last wrote it */
    uint32_t sync;               /* how often its lanes have waited for each other */
    uint64_t wgmma_fence;        /* 1 + the value of `steps` at the last wgmma.fence; 0: none yet */
};

struct Cta {
    Machine *m;
    uint32_t rank, index, id[3]; /* rank in the cluster, linear index in the grid, %ctaid */
    uint8_t *shared;
    uint32_t *shared_history;    /* per 2 bytes of shared memory: its last write and the reads since (order.c) */
    LaneTouch *lane_history;     /* per 2 bytes of shared memory: which lane touched it last (order.c) */
    uint8_t *tile_swizzle;       /* per 16 bytes of shared memory: 1 + the swizzle with which a tensor copy wrote them, 0: something else did */
    uint8_t *mbarrier_at;        /* per 8 bytes of shared memory: 1 + number of the mbarrier that lives there */
    Mbarrier mbarriers[MAX_MBARRIERS];
    int n_mbarriers;
    Barrier named[16];
    uint32_t *tmem, *tmem_history;
    uint16_t tmem_owner[TMEM_COLUMNS / 32];  /* per 32 columns: 0 free, else the allocation's number */
    int tmem_allocations, tmem_relinquished;
    int32_t tmem_alloc_pc[32];
    uint8_t *constants;          /* NULL: the program's own serve */
    Warp *warps;
    int n_warps;
};

struct Machine {
    /* the program */
    const Insn *code;
    int32_t n_code, register_bytes, n_registers, local_bytes;
    const uint8_t *constants;
    uint64_t constant_bytes;
    const int32_t *relocations;  /* constants that are shared addresses, to which each CTA adds its rank: offset << 1 | is it 64 bits wide */
    int32_t n_relocations;
    uint32_t static_shared, dynamic_shared;
    /* the launch */
    uint32_t grid[3], block[3], cluster[3];
    const uint8_t *param;
    uint64_t param_size;
    Allocation *allocations;
    int32_t n_allocations;
    /* options */
    int32_t strict, schedule, sm100, approximate;
    uint64_t seed, step_limit;
    void (*ask)(int32_t function, int32_t ftz, lanes_t on, const float *x, float *y);   /* approximate functions; NULL: the machine's own */
    /* results */
    uint64_t *executed;          /* per warp index and instruction: fragments executed */
    int32_t n_findings, faulted;
    uint64_t counts[64];
    Finding findings[MAX_FINDINGS];
    /* state; what stands above is mirrored in launch.py */
    Cta *ctas;
    int n_ctas;
    uint32_t agents, clock_words;   /* n_ctas * AGENTS: the length of a vector clock; and of all of a Clock's */
    uint64_t random, progress, tick;
    Barrier cluster_barrier;
    Warp *running;
    jmp_buf stop;
    int32_t ctas_synchronise;    /* an atomic, acquire or release reached global memory: CTAs may order each other */
};

enum {                           /* indices of Machine.counts; named in launch.py */
    COUNT_GLOBAL_LOAD_BYTES, COUNT_GLOBAL_LOAD_SECTORS, COUNT_GLOBAL_LOAD_LINES,
    COUNT_GLOBAL_STORE_BYTES, COUNT_GLOBAL_STORE_SECTORS, COUNT_GLOBAL_STORE_LINES,
    COUNT_GLOBAL_STORE_FULL_SECTORS, COUNT_GLOBAL_STORE_FULL_LINES,
    COUNT_ATOMIC_BYTES, COUNT_TMA_LOAD_BYTES, COUNT_TMA_STORE_BYTES, COUNT_TMA_OPERATIONS,
    COUNT_SHARED_LOAD_BYTES, COUNT_SHARED_STORE_BYTES,
    COUNT_SHARED_LOAD_WAVEFRONTS, COUNT_SHARED_STORE_WAVEFRONTS,
    COUNT_MMA_BF16, COUNT_MMA_FP16, COUNT_MMA_TF32, COUNT_MMA_FP8,
    COUNT_TRANSCENDENTALS, COUNT_BARRIERS, COUNT_INSTRUCTIONS, COUNT_TMEM_BYTES, COUNT_CPASYNC_BYTES
};

#define OP(name) status_t op_##name(Machine *m, Warp *w, const int32_t *a, lanes_t on)
#define EACH for (int l = 0; l < WARP; l++)
#define ON(l) (on >> (l) & 1)

/* Operands: an offset into the warp's registers, or (negative) the complement of an offset into the constants. */
static inline const void *operand(const Warp *w, int32_t o) { return o >= 0 ? w->registers + o : w->constants + ~o; }
static inline const uint32_t *u32(const Warp *w, int32_t o) { return operand(w, o); }
static inline const uint64_t *u64(const Warp *w, int32_t o) { return operand(w, o); }
/* Predicates: the offset shifted left by one, bit 0 set for "!". */
static inline lanes_t predicate(const Warp *w, int32_t o) {
    lanes_t v = *(const lanes_t *)operand(w, o >> 1);
    return o & 1 ? ~v : v;
}
static inline void set_predicate(Warp *w, int32_t o, lanes_t v, lanes_t on) {
    if (o < 0) return;           /* the sink "_" */
    lanes_t *p = (lanes_t *)(w->registers + o);
    *p = (*p & ~on) | (v & on);
}
static inline int first_lane(lanes_t on) { return __builtin_ctz(on); }
static inline int32_t pc_of(const Warp *w) { return w->fragments[w->current].pc; }
static inline uint32_t agent(const Warp *w, int kind) { return w->cta->rank * AGENTS + kind + w->index; }
static inline uint32_t shared_offset(uint32_t address) { return address & 0xffffff; }

/* report.c */
void finding(Machine *m, const char *kind, int32_t other_pc, lanes_t on, const char *format, ...) __attribute__((format(printf, 5, 6)));
void fault(Machine *m, const char *kind, lanes_t on, const char *format, ...) __attribute__((noreturn, format(printf, 4, 5)));
void waiting(Warp *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* order.c */
Clock clock_new(Machine *m);
void clock_free(Clock c);
void clock_join(Machine *m, Clock into, Clock from);
void clock_clear(Machine *m, Clock c);
void release(Machine *m, Warp *w, Clock into);       /* what w has done becomes part of `into`, and w's clock ticks */
void acquire(Machine *m, Warp *w, Clock from);       /* the executing lanes know what `from` says */
void history_start(void);                            /* of a launch */
void history_reset(void);                            /* of a cluster: what others did counts no more */
void touch_tmem(Machine *m, Warp *issuer, Cta *owner, uint32_t lane, uint32_t column, uint32_t columns, Access access);
void touch_global(Machine *m, Warp *issuer, Allocation *r, uint64_t at, uint32_t bytes, Access access, int lane);   /* lane: -1 for an asynchronous unit */
void touch_shared(Machine *m, Warp *issuer, Cta *owner, uint32_t offset, uint32_t bytes, Access access);
void touch_lane(Machine *m, Warp *w, Cta *owner, uint32_t offset, uint32_t bytes, int lane, access_kind_t kind);
void lanes_meet(Warp *w);                            /* if all its lanes execute: every lane of w knows what the others have done and know */
Access own_access(Warp *w, access_kind_t kind);
Access async_access(Warp *w, uint32_t agent, uint32_t clock, access_kind_t kind);

/* memory.c */
uint8_t *shared_at(Machine *m, Warp *w, uint32_t address, uint32_t bytes, Cta **owner);   /* checks bounds; any CTA of the cluster */
uint8_t *global_at(Machine *m, Warp *w, uint64_t address, uint32_t bytes, Access access, int lane);   /* checks bounds and order */
uint64_t effective_address(const Warp *w, const int32_t *a, int lane);                    /* of an encoded address: register, wide?, displacement */
uint8_t *any_at(Machine *m, Warp *w, int lane, int space, uint64_t address, uint32_t bytes, access_kind_t kind);
enum { SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED, SPACE_CLUSTER, SPACE_LOCAL, SPACE_PARAM };   /* in the instruction table's order */
#define SHARED_WINDOW 0x0100000000000000ull
#define LOCAL_WINDOW  0x0200000000000000ull
#define PARAM_WINDOW  0x0300000000000000ull

/* mbarrier.c */
Mbarrier *mbarrier_at(Machine *m, Warp *w, uint32_t address, Cta **owner);
void mbarrier_for_async(Machine *m, const Mbarrier *b, const Cta *owner);   /* checks that the async proxy may see it */
void mbarrier_fence(Warp *w, int others);            /* the warp's initialisations (and others it knows of) become visible to it */
void mbarrier_arrive(Machine *m, Mbarrier *b, Cta *owner, uint32_t count);
void mbarrier_transaction(Machine *m, Mbarrier *b, Cta *owner, int64_t bytes);   /* positive: expected; negative: completed */
uint32_t mbarrier_agent(const Mbarrier *b, const Cta *owner);
void mbarrier_check_end(Machine *m, Cta *c);

/* tensor_memory.c */
void tmem_check_end(Machine *m, Cta *c);

/* tensor_core.c */
typedef enum { BF16, FP16, TF32, E4M3, E5M2 } element_t;
typedef struct { uint32_t start, lead, stride, swizzle_bits; } MatrixDescriptor;
float element_value(element_t type, uint32_t bits);
int element_size(element_t type);
uint32_t matrix_offset(const MatrixDescriptor *d, int k_major, int size, int row, int k);
void exponents(element_t type, const float *x, int count, int *to);
void accumulate(const float *a, const int *ea, const float *b, const int *eb, const float *c, float *d, int n, int k);
void load_matrix(Machine *m, Warp *w, Cta *cta, const MatrixDescriptor *d, int k_major, element_t type, int row0, int rows, int k, float *to, Access access);
uint32_t swizzle(uint32_t address, uint32_t bits);
int count_of(element_t type);

/* alu.c */
uint16_t half_bits(double x, int bf16);              /* to nearest even */

/* barrier.c */
void barrier_recheck(Machine *m, Cta *c);            /* after a warp's exit */


/* scheduler.c */
int run(Machine *m);
#endif
