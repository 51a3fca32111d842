/* Integer products of quantised weights with bfloat16 x, with AVX2 and AVX-512. As in llama.cpp, x is quantised in
 * blocks while the linear runs, but to 16 bits: its products with integer codes are exact in 32 bits. VPMADDWD
 * multiplies twice as many numbers as a fused multiply-add of floats, and VNNI's VPDPWSSD also adds the products to the
 * sums. Unpacking costs less too: codes become a register of 16-bit integers in two instructions, and half as many
 * floats in three. Codes of 4 bits are unpacked once for all rows of an item.
 *
 * Definition: a chunk is a group of the weight, or at most CHUNK columns of a larger group. E is the exponent of the
 * chunk's largest |x|, at least -100. The scale of x is u = 2^(E - 14), and q = x / u rounded to an integer (ties to
 * even; |q| < 2^15):
 *
 *     y = sum over chunks, in order, of scale * (u * sum of (code - zero) * q)      (one fused multiply-add for each)
 *
 * The inner sum is exact, and is rounded once to float32. If zero points are fractions, y first gets
 * -(zero * scale) * (u * sum of q) of each chunk of a span (see Span), and then the sums without zero points. bfloat16
 * has 8 significant bits, so q is x / u exactly where |x| is at least 2^(E - 7); smaller x change by at most u / 2. A
 * chunk with an infinity or a NaN gives NaN. A row's bits depend neither on the other rows of the call nor on the class.
 * Codes of FP8 (e4m3) have too wide a range for 16 bits. The class `amx` unpacks the weight to bfloat16 instead: AMX has
 * no products of 16-bit integers. */
#pragma once
#include "linear.h"

#if defined(__AVX2__)
#define HAS_INTEGER_PRODUCTS 1
#else
#define HAS_INTEGER_PRODUCTS 0
#endif

#define CHUNK 128         /* most columns of a chunk: 128 * 2^7 * 2^15, twice for a zero point, is below 2^31 */
#define INTEGER_VECTORS 2 /* vectors of features in a tile; MOST_VECTORS if the call has one row */
#define INTEGER_ROWS (ACCUMULATORS / 3) /* most rows of a tile: with AVX2 8 of 16 registers are sums, with AVX-512 16 of 32 */
#define LEAST_EXPONENT 27 /* E = -100 with bfloat16's bias of 127. u is normal and 1 / u finite from 15 on */

INLINE int uses_integer_products(const Weight *w) {
    return HAS_INTEGER_PRODUCTS && w->kind != PLAIN && w->kind != CODES_FP8;
}

/* `w` without its zero points if they may be fractions. */
INLINE Weight without_fractions(const Weight *w) {
    Weight whole = *w;
    if (w->zero_type != INT8) whole.zeros = NULL;
    return whole;
}

INLINE int64_t chunks_of_group(const Weight *w) { return (w->group + CHUNK - 1) / CHUNK; }
INLINE int64_t chunks_of(const Weight *w) {
    const int64_t full = groups_of(w) - 1;
    return full * chunks_of_group(w) + (w->depth - full * w->group + CHUNK - 1) / CHUNK;
}

/* Chunk `index` of the weight: columns [begin, end), all of one group. The last chunk ends at the padded depth. */
typedef struct {
    int64_t chunks, groups; /* how many the weight has */
    int64_t index, group, group_end, begin, end;
} Chunk;

INLINE int64_t end_of_chunk(const Weight *w, const Chunk *c) {
    return c->index + 1 == c->chunks ? padded_depth(w->depth) : min_i64(c->begin + CHUNK, c->group_end);
}

INLINE Chunk chunk_at(const Weight *w, int64_t index) {
    const int64_t group = index / chunks_of_group(w), begin = group * w->group + index % chunks_of_group(w) * CHUNK;
    Chunk c = {chunks_of(w), groups_of(w), index, group, (group + 1) * w->group, begin, 0};
    c.end = end_of_chunk(w, &c);
    return c;
}

/* Moves to the next chunk without the divisions of chunk_at: with chunks of 32 columns they took 5% of the time. */
INLINE void next_chunk(const Weight *w, Chunk *c) {
    c->index++, c->begin = c->end;
    if (c->begin == c->group_end) c->group++, c->group_end += w->group;
    c->end = end_of_chunk(w, c);
}

#define MOST_CHUNKS (CHUNK / 8)   /* most chunks of a span */
#define SPAN (CHUNK + 2 * TILE_WORDS) /* most columns of a span, padding included */
#define UNPACKED_PAIRS -1         /* beside the kinds of codes */

/* Chunks that a tile multiplies at a time: as many as have at most CHUNK columns together, or one. Each chunk of a span
 * of several is a whole group. */
typedef struct {
    int64_t index, group, groups; /* the first chunk and its group; the groups of the weight */
    int64_t begin, end, count;    /* columns [begin, end); the number of chunks */
    int64_t ends[MOST_CHUNKS];    /* the end of each chunk */
    int64_t ahead, scales_ahead;  /* how far before their use codes (in words) and scales are prefetched */
} Span;

/* Sets `span` to the one that begins with `chunk`, and moves `chunk` behind it. What is prefetched is at the same place
 * of the next span: after the last one of `panels` panels, of the first one of the next panels. */
INLINE void take_span(const Weight *w, int64_t panels, Chunk *chunk, Span *span) {
    int64_t count = 0;
    span->index = chunk->index, span->group = chunk->group, span->groups = chunk->groups, span->begin = chunk->begin;
    do span->ends[count++] = span->end = chunk->end, next_chunk(w, chunk);
    while (chunk->index < chunk->chunks && chunk->end - span->begin <= CHUNK);
    const int64_t more = chunk->index < chunk->chunks ? 0 : panels - 1, per_word = w->kind == CODES_INT8 ? 4 : 8;
    span->ahead = (span->end - span->begin + more * padded_depth(w->depth)) / per_word * PANEL;
    span->scales_ahead = (count + more * span->groups) * PANEL;
    span->count = count;
}

/* The m rows of a tile, quantised. A word of n codes is multiplied as pairs: code i with code i + n / 2, for i < n / 2. */
typedef struct {
    uint32_t *pairs; /* [padded depth / 2][m]: the two q for a pair of codes, the first one's in the low half */
    float *x_scales; /* [chunks][m]: u */
    int32_t *x_sums; /* [chunks][m]: the sum of q, for zero points and OFFSET */
} IntegerRows;

INLINE int64_t integer_row_bytes(const Weight *w, int64_t chunks) { return padded_depth(w->depth) * 2 + chunks * 8; }

INLINE IntegerRows integer_rows(const Linear *l, int64_t chunks, int64_t first, int64_t m) {
    char *tile = (char *)l->scratch + first * integer_row_bytes(&l->weight, chunks);
    char *x_scales = tile + padded_depth(l->weight.depth) * 2 * m;
    return (IntegerRows){(uint32_t *)tile, (float *)x_scales, (int32_t *)(x_scales + chunks * 4 * m)};
}

#if HAS_INTEGER_PRODUCTS
/* Quantises `count` columns of a row. `count`: a multiple of 8. `per_word`: how many codes a word of the weight has. */
INLINE void quantise_columns(const uint16_t *x, int64_t count, const int per_word, uint32_t *pairs, float *x_scale,
                             int32_t *x_sum) {
    const __m128i magnitude = _mm_set1_epi16(0x7FFF);
    __m128i top = _mm_setzero_si128(), total = top;
    for (int64_t k = 0; k < count; k += 8)
        top = _mm_max_epu16(top, _mm_and_si128(_mm_loadu_si128((const void *)(x + k)), magnitude));
    /* SSE has an instruction for the smallest of eight numbers only, so it gets the complement of `top`. */
    const int largest = 0xFFFF - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(top, _mm_set1_epi16(-1))), 0);
    const uint32_t exponent = (uint32_t)max_i64(largest >> 7, LEAST_EXPONENT);
    const float inverse = from_bits((127 + 127 + 14 - exponent) << 23);
    *x_scale = exponent == 255 ? NAN : from_bits((exponent - 14) << 23);
    for (int64_t k = 0; k < count; k += 8) {
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(x + k))), 16);
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)bits, _mm256_set1_ps(inverse)));
        /* The lower lane gets the first halves of the words (one word of 8 codes, or two of 4), the upper one the second. */
        const __m256i halves = per_word == 8 ? q : _mm256_permute4x64_epi64(q, _MM_SHUFFLE(3, 1, 2, 0));
        const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
        const __m128i pair = _mm_blend_epi16(first, _mm_slli_epi32(second, 16), 0xAA);
        total = _mm_add_epi32(total, _mm_madd_epi16(pair, _mm_set1_epi16(1)));
        _mm_storeu_si128((void *)(pairs + k / 2), pair);
    }
    total = _mm_add_epi32(total, _mm_shuffle_epi32(total, _MM_SHUFFLE(1, 0, 3, 2)));
    *x_sum = _mm_cvtsi128_si32(total) + _mm_extract_epi32(total, 1);
}

/* Quantises chunks [from, to) of rows [first, first + m). */
static void quantise_rows(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to) {
    const Weight *w = &l->weight;
    const IntegerRows tile = integer_rows(l, chunks_of(w), first, m);
    for (Chunk chunk = chunk_at(w, from); chunk.index < to; next_chunk(w, &chunk)) {
        const int64_t count = chunk.end - chunk.begin, inside = min_i64(chunk.end, w->depth) - chunk.begin;
        uint32_t pairs[INTEGER_ROWS][CHUNK / 2 + TILE_WORDS];
        for (int64_t i = 0; i < m; i++) {
            const uint16_t *x = (const uint16_t *)source_row(l, first + i, BF16) + (w->order ? 0 : chunk.begin);
            uint16_t copy[CHUNK + 2 * TILE_WORDS];
            if (w->order || inside < count) {
                for (int64_t k = 0; k < count; k++) copy[k] = k >= inside ? 0 : w->order ? x[w->order[chunk.begin + k]] : x[k];
                x = copy;
            }
            float *x_scale = tile.x_scales + chunk.index * m + i;
            int32_t *x_sum = tile.x_sums + chunk.index * m + i;
            if (codes_of_word(w->kind) == 8) quantise_columns(x, count, 8, pairs[i], x_scale, x_sum);
            else quantise_columns(x, count, 4, pairs[i], x_scale, x_sum);
        }
        uint32_t *to_pairs = tile.pairs + chunk.begin / 2 * m;
        for (int64_t k = 0; k < count / 2; k++)
            for (int64_t i = 0; i < m; i++) *to_pairs++ = pairs[i][k];
    }
}

/* What halves_of adds to every code: 8 to INT4, 12 to twice an FP4 number, so that none is negative. The table lookup
 * of FP4 also puts 12, its entry 0, into the upper byte of each half. Sums may exceed 2^31 before OFFSET times x_sum is
 * subtracted. The result is right, because they are right modulo 2^32. */
#define OFFSET(KIND) ((KIND) == CODES_INT4 ? 8 : (KIND) == CODES_FP4 ? 12 + 12 * 256 : 0)

/* Pair i of each word's codes (see IntegerRows), as two 16-bit integers plus OFFSET. An FP4 is doubled. */
INLINE Words halves_of(Words words, const int i, const int kind) {
    if (kind == CODES_INT8) return (Words)(i == 0 ? (Shorts)(words << 8) >> 8 : (Shorts)words >> 8);
    if (kind == CODES_INT4) words ^= 0x88888888u;
    words = i == 3 ? (Words)((UnsignedShorts)words >> 12) : words >> (4 * i) & 0x000F000Fu;
    if (kind == CODES_INT4) return words;
    const __m128i twice = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#if defined(__AVX512F__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(twice), (__m512i)words);
#else
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(twice), (__m256i)words);
#endif
}

/* Adds the products of the two 16-bit integers in each lane of a and b to the lane of `sum`. */
INLINE Words add_products(Words sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
    return (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (Words)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    /* In assembly, because compilers compute all products first, which do not fit into the registers. */
    Words products;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(a), "v"(b));
    return sum;
#endif
}

/* a * b + c, rounded once. */
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* The scales of a span, [chunks][n], times the factor of the codes. */
INLINE void load_span_scales_of(const int type, const Weight *w, int64_t panel, int64_t n, const Span *span,
                                Floats *scales) {
    const float factor = w->kind == CODES_FP4 ? 0.5f : 1.0f;
    for (int64_t j = 0; j < n; j++) {
        const int64_t first = place_of_scales(span->groups, panel, span->group, j);
        const Floats of_rows = row_scales_of(w, panel, j) * factor;
        const char *ahead = (const char *)w->scales + (first + span->scales_ahead) * scale_bytes(type);
        for (int64_t i = 0; i < span->count * PANEL * scale_bytes(type) && j % VECTORS == 0; i += 64)
            __builtin_prefetch(ahead + i);
        for (int64_t i = 0; i < span->count; i++)
            scales[i * n + j] = load_scales(w->scales, first + i * PANEL, type) * of_rows;
    }
}

INLINE void load_span_scales(const Weight *w, int64_t panel, int64_t n, const Span *span, Floats *scales) {
    if (w->scale_type == FP8) load_span_scales_of(FP8, w, panel, n, span, scales);
    else if (w->scale_type == E8M0) load_span_scales_of(E8M0, w, panel, n, span, scales);
    else if (w->scale_type == BF16) load_span_scales_of(BF16, w, panel, n, span, scales);
    else if (w->scale_type == F16) load_span_scales_of(F16, w, panel, n, span, scales);
    else load_span_scales_of(F32, w, panel, n, span, scales);
}

/* Unpacks a span of INTEGER_VECTORS vectors of features from `panel` on, [pairs of columns][vectors]: each pair of a
 * word's codes less their zero points, as two 16-bit integers. `kind`, of 4 bits, is a constant at every call. */
INLINE void unpack_span_of(const int kind, const Weight *w, int64_t panel, const Span *span, uint32_t *halves) {
    const int n = INTEGER_VECTORS;
    const int64_t stride = padded_depth(w->depth) / 8 * PANEL;
    const uint32_t *codes = (const uint32_t *)w->packed + panel * stride + span->begin / 8 * PANEL;
    int64_t k = span->begin;
    for (int64_t i = 0; i < span->count; i++) {
        Shorts offset[INTEGER_VECTORS];
        for (int j = 0; j < n; j++) {
            offset[j] = (Shorts)((Words){} + OFFSET(kind) * 0x00010001u);
            if (!w->zeros) continue;
            const int8_t *zeros = (const int8_t *)w->zeros + place_of_scales(span->groups, panel, span->group + i, j);
            const Words zero = load_bytes(zeros);
            offset[j] += (Shorts)(zero << 8 | zero << 24) >> 8; /* sign-extended to both halves */
        }
        for (; k < span->ends[i]; k += 8, codes += PANEL, halves += 4 * n * LANES)
#pragma GCC unroll 2
            for (int j = 0; j < n; j++) {
                const uint32_t *at = codes + j / VECTORS * stride + j % VECTORS * LANES;
                const Words words = load_words(at);
                if (j % VECTORS == 0) __builtin_prefetch(at + span->ahead);
#pragma GCC unroll 4
                for (int p = 0; p < 4; p++) {
                    const Words pair = (Words)((Shorts)halves_of(words, p, kind) - offset[j]);
                    memcpy(halves + (p * n + j) * LANES, &pair, sizeof pair);
                }
            }
    }
}

static void unpack_span(const Weight *w, int64_t panel, const Span *span, uint32_t *halves) {
    if (w->kind == CODES_INT4) unpack_span_of(CODES_INT4, w, panel, span, halves);
    else unpack_span_of(CODES_FP4, w, panel, span, halves);
}

/* sums[m][n] += a span of m rows times n vectors of features from `panel` on. `kind`: that of the codes, or UNPACKED_PAIRS
 * for what unpack_span has written to `halves`. m, n and kind are constants at every call. */
INLINE void integer_tile(const int m, const int n, const int kind, const Weight *w, int64_t panel, const Span *span,
                         const IntegerRows *x, const uint32_t *halves, const Floats *scales, Floats *sums) {
    const int is_unpacked = kind == UNPACKED_PAIRS, per_word = kind == CODES_INT8 ? 4 : 8, half = per_word / 2;
    const int64_t stride = padded_depth(w->depth) / per_word * PANEL, step = is_unpacked ? half * n * LANES : PANEL;
    const uint32_t *codes = (const uint32_t *)w->packed + panel * stride + span->begin / per_word * PANEL;
    const uint32_t *pairs = x->pairs + span->begin / 2 * m;
    const int32_t *x_sums = x->x_sums + span->index * m;
    const float *x_scales = x->x_scales + span->index * m;
    int64_t k = span->begin;
    if (is_unpacked) codes = halves;
    for (int64_t chunk = 0; chunk < span->count; chunk++, x_sums += m, x_scales += m, scales += n) {
        Words sum[ACCUMULATORS];
        for (int r = 0; r < m; r++)
            for (int j = 0; j < n; j++)
                sum[r * n + j] = (Words){} - (is_unpacked ? 0 : OFFSET(kind) * (uint32_t)x_sums[r]);
        for (int j = 0; j < n && w->zeros && !is_unpacked; j++) {
            const int8_t *zeros = (const int8_t *)w->zeros + place_of_scales(span->groups, panel, span->group + chunk, j);
            const Ints zero = (Ints)(load_bytes(zeros) << 24) >> 24;
            for (int r = 0; r < m; r++) sum[r * n + j] -= (Words)zero * (uint32_t)x_sums[r];
        }
        for (; k < span->ends[chunk]; k += per_word, codes += step, pairs += half * m) {
            Words loaded[MOST_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < n && !is_unpacked; j++) {
                const uint32_t *at = codes + j / VECTORS * stride + j % VECTORS * LANES;
                loaded[j] = load_words(at);
                if (j % VECTORS) continue;
                /* Calls of more rows are compute-bound, and slower with the codes in L2. */
                if (n == MOST_VECTORS) prefetch_to_l2(at + span->ahead);
                else __builtin_prefetch(at + span->ahead);
            }
#pragma GCC unroll 4
            for (int i = 0; i < half; i++) {
                Words both[MOST_VECTORS];
#pragma GCC unroll 4
                for (int j = 0; j < n; j++)
                    both[j] = is_unpacked ? load_words(codes + (i * n + j) * LANES) : halves_of(loaded[j], i, kind);
#pragma GCC unroll 8
                for (int r = 0; r < m; r++) {
                    const Words pair = (Words){} + pairs[i * m + r];
#pragma GCC unroll 4
                    for (int j = 0; j < n; j++) sum[r * n + j] = add_products(sum[r * n + j], both[j], pair);
                }
            }
        }
        for (int r = 0; r < m; r++)
            for (int j = 0; j < n; j++) {
                const Floats exact = __builtin_convertvector((Ints)sum[r * n + j], Floats) * x_scales[r];
                sums[r * n + j] = fused(exact, scales[j], sums[r * n + j]);
            }
        /* Without this the compiler would keep these sums in registers that the loop above needs, and spill them. */
        for (int i = 0; i < m * n; i++) __asm__("" : "+m"(sums[i]));
    }
}

/* `n`: MOST_VECTORS if the call has one row, else INTEGER_VECTORS. `halves`: null, or the unpacked span. */
static void tile_of_integers(int64_t m, int64_t n, const Weight *w, int64_t panel, const Span *span, const IntegerRows *x,
                             const uint32_t *halves, const Floats *scales, Floats *sums) {
#define TILE_OF(M, N, KIND) integer_tile(M, N, KIND, w, panel, span, x, halves, scales, sums)
#define ROWS_OF(M, N) \
    if (halves) TILE_OF(M, N, UNPACKED_PAIRS); \
    else if (w->kind == CODES_INT8) TILE_OF(M, N, CODES_INT8); \
    else if (w->kind == CODES_INT4) TILE_OF(M, N, CODES_INT4); \
    else TILE_OF(M, N, CODES_FP4); \
    break;
#define CASE_OF(M) \
    case M: ROWS_OF(M, INTEGER_VECTORS)
    switch (n == MOST_VECTORS ? 0 : m) {
        case 0: ROWS_OF(1, MOST_VECTORS)
        CASE_OF(1) CASE_OF(2) CASE_OF(3) CASE_OF(4)
#if INTEGER_ROWS > 4
        CASE_OF(5) CASE_OF(6) CASE_OF(7) CASE_OF(8)
#endif
    }
#undef CASE_OF
#undef ROWS_OF
#undef TILE_OF
}

/* The zero points of a span, of a float type, [chunks][n], times `scales`. */
INLINE void load_span_zeros_of(const int type, const Weight *w, int64_t panel, int64_t n, const Span *span,
                               const Floats *scales, Floats *zeros) {
    for (int64_t j = 0; j < n; j++) {
        const int64_t first = place_of_scales(span->groups, panel, span->group, j);
        const char *ahead = (const char *)w->zeros + (first + span->scales_ahead) * scale_bytes(type);
        for (int64_t i = 0; i < span->count * PANEL * scale_bytes(type) && j % VECTORS == 0; i += 64)
            __builtin_prefetch(ahead + i);
        for (int64_t i = 0; i < span->count; i++)
            zeros[i * n + j] = load_scales(w->zeros, first + i * PANEL, type) * scales[i * n + j];
    }
}

static void load_span_zeros(const Weight *w, int64_t panel, int64_t n, const Span *span, const Floats *scales,
                            Floats *zeros) {
    if (w->zero_type == BF16) load_span_zeros_of(BF16, w, panel, n, span, scales, zeros);
    else if (w->zero_type == F16) load_span_zeros_of(F16, w, panel, n, span, scales, zeros);
    else load_span_zeros_of(F32, w, panel, n, span, scales, zeros);
}

/* sums[m][n] -= what the zero points of a span subtract. `zeros`: of load_span_zeros. n is a constant at every call. */
INLINE void subtract_zeros_of(int64_t m, const int n, const Span *span, const IntegerRows *x, const Floats *zeros,
                              Floats *sums) {
    const int32_t *x_sums = x->x_sums + span->index * m;
    const float *x_scales = x->x_scales + span->index * m;
    float totals[MOST_CHUNKS * INTEGER_ROWS];
    for (int64_t i = 0; i < span->count * m; i++) totals[i] = -(float)x_sums[i] * x_scales[i];
    for (int64_t r = 0; r < m; r++, sums += n) {
        Floats sum[MOST_VECTORS];
        for (int j = 0; j < n; j++) sum[j] = sums[j];
        for (int64_t i = 0; i < span->count; i++)
            for (int j = 0; j < n; j++) sum[j] = fused((Floats){} + totals[i * m + r], zeros[i * n + j], sum[j]);
        for (int j = 0; j < n; j++) sums[j] = sum[j];
    }
}

static void subtract_zeros(int64_t m, int64_t n, const Span *span, const IntegerRows *x, const Floats *zeros, Floats *sums) {
    if (n == MOST_VECTORS) subtract_zeros_of(m, MOST_VECTORS, span, x, zeros, sums);
    else subtract_zeros_of(m, INTEGER_VECTORS, span, x, zeros, sums);
}
#else
INLINE void quantise_rows(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to) {
    (void)l, (void)first, (void)m, (void)from, (void)to;
}
#endif
