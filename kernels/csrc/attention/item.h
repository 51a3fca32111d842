/* A work item of paged attention, the working memory of a thread, and functions of the softmax. attention.c explains
 * the algorithm. vectors.h and tiles.h have the inner loops, tiles.h those of AMX. */
#pragma once
#include "attention/attention.h"
#include "simd/vectors.h"

#ifdef __AMX_BF16__
#define HAS_TILES 1
#define ROWS 192     /* the most rows of one work item */
#define TILE 16      /* rows that are computed together */
#define WORD_STEP 16 /* a row is padded with zeros to a multiple of this many words */
#else
#define HAS_TILES 0
#define ROWS 96
#define TILE 6
#define WORD_STEP 1
#endif

/* Whether rows of quantised and float16 caches are converted where they are read (convert.h), not copied before. */
#if defined(__AVX2__) && !HAS_DOT
#define CONVERTS_IN_PLACE 1
#define FP8_SCALE 256.0f         /* FP8 elements are read as their value divided by this */
#define IN_PLACE_ROWS (2 * TILE) /* the most rows of an item whose values are converted at each use, not once */
#else
#define CONVERTS_IN_PLACE 0
#define FP8_SCALE 1.0f
#endif
enum { INT4_HIGH = 6 }; /* a type for the second half of an INT4 row, which is in the high nibbles */

#define CHUNK 64     /* keys packed at once */
#define PART 16      /* keys that are interleaved in a packed chunk */
#define MAX_ROPE 64
#define MAX_VALUE 512
#define PAIR (HAS_DOT ? 2 : 1) /* elements of a packed word: two of bfloat16, or one of float32 */
#define MAX_WORDS ((512 + MAX_ROPE) / PAIR)
#define LOG2E 1.44269504088896f

typedef struct {
    const Attention *a;
    int64_t seq, kv_head, seq_len, q_len, group;
    int64_t row, rows;             /* the item has rows [row, row + rows) of q_len * group */
    int64_t split, splits;         /* which splits of the sequence this item sums */
    float *partial;                /* [rows][value_dim + 2]: a decode's split stores (o, peak, sum); or null */
} Item;

/* The parts of a chunk: PART keys, or their values, whose rows are contiguous. In the cache or, if they were copied, in
 * the working memory. */
typedef struct {
    int64_t count; /* of the chunk's keys that are read */
    int64_t k_type, v_type; /* of the elements; those of rotary rows are of k_type */
    int64_t k_stride, v_stride, rope_stride; /* bytes from one row to the next */
    const uint8_t *k[CHUNK / PART], *v[CHUNK / PART], *rope[CHUNK / PART];
    const uint16_t *k_scales[CHUNK / PART], *v_scales[CHUNK / PART], *rope_scales[CHUNK / PART];
} Parts;

typedef struct {
    Parts parts[2], *now, *next;      /* of this chunk, and of the one that is read after it, or null */
    uint32_t q[ROWS * MAX_WORDS];     /* tiles of [words][m]; for AMX [ROWS][words] */
    uint32_t k[CHUNK * MAX_WORDS];    /* [4 parts][words][16 keys] */
    uint32_t v[HAS_DOT ? CHUNK / 2 * MAX_VALUE : 1]; /* [pairs of keys][value_dim]; for AMX tiles of [pairs][16
                                                        dimensions]. Without pairs, values are read in place. */
    uint32_t p[TILE * CHUNK / PAIR];  /* the weights, [m][words] */
    float score[TILE * CHUNK], rope_score[TILE * CHUNK];
    float o[ROWS * MAX_VALUE], all[ROWS * MAX_VALUE];
    Floats sum[ROWS];
    float peak[ROWS], all_sum[ROWS], all_peak[ROWS];
    float k_scales[CHUNK], v_scales[CHUNK], rope_scales[CHUNK];
    uint32_t wide_k[CHUNK * MAX_VALUE / PAIR], wide_v[CHUNK * MAX_VALUE / PAIR]; /* copies of rows */
    uint32_t wide_rope[CHUNK * MAX_ROPE / PAIR];
} Scratch;

/* For functions whose sums must have the same bits wherever they are called: the compiler may fuse a multiplication and
 * an addition in one inlined copy and not in another. Then a row's bits would depend on the other rows of its tile. */
#define ONE_COPY static __attribute__((noinline))

/* Words of a packed row, in whole steps; and of a packed key or query: its cache row, then its rotary row. */
INLINE int64_t row_words(int64_t dim) { return (dim / PAIR + WORD_STEP - 1) / WORD_STEP * WORD_STEP; }
INLINE int64_t key_words(const Attention *a) { return row_words(a->cache->dim) + row_words(a->rope_dim); }

/* The type of copies of rows that are not read in place. */
INLINE int row_type(const Attention *a) { return HAS_DOT || a->cache->kind == BF16 ? BF16 : F32; }

/* Whether rows are read in the cache. Half an INT4 row must be whole vectors for that. */
INLINE int reads_in_place(const Attention *a) {
    const int64_t kind = a->cache->kind, dim = a->cache->dim;
    if (a->cache->block_size % PART) return 0;
    if (kind == row_type(a)) return 1;
    return CONVERTS_IN_PLACE && (kind != INT4 || (dim % 32 == 0 && a->rope_dim % 32 == 0));
}

#if HAS_DOT
/* 2^x for x <= 0, with an error of 4e-6: vreduceps gives the fraction, a polynomial its power, and vscalefps scales by
 * floor(x). The weights are then rounded to bfloat16, so that more terms would be useless. 2^-inf is exactly 0. */
INLINE Floats weight_of(Floats x) {
    Floats f = (Floats)_mm512_reduce_ps((__m512)x, 1), y = f * 1.342668550e-2f + 5.224247146e-2f;
    y = y * f + 2.412802067e-1f;
    y = y * f + 6.930448445e-1f;
    y = y * f + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
}
#else
INLINE Floats weight_of(Floats x) { return exp2_of(x); }
#endif

/* cap * tanh(x / cap) * log2(e): the soft-capped score, as a power of two. */
INLINE Floats capped(Floats x, float cap) {
    const Floats most = (Floats){} + 60.0f, scaled = x * (2 * LOG2E / cap);
    const Floats e = weight_of(-larger_of(-scaled, -most));
    return (e - 1.0f) / (e + 1.0f) * (cap * LOG2E);
}
