/* Runs linears and attention over random bfloat16 in the class CPU_CLASS, and exits with 1 if a result differs from the
 * plain sum in double precision by more than bfloat16 rounds. test_arm64.py builds it for arm64. */
#include <stdio.h>
#include <stdlib.h>

#include "attention/attention.h"
#include "linear.h"
#include "simd/cpu_class.h"

int has_class(const char *name);
void pack_weight(const void *from, int64_t features, int64_t depth, void *to, int64_t type);
void FOR_CLASS(linear_bf16)(const Linear *l);
int attention_bf16_generic(const Attention *a);

static uint16_t *random_rows(int64_t count) {
    uint16_t *x = malloc(count * 2);
    for (int64_t i = 0; i < count; i++) x[i] = to_bf16((float)rand() / (float)RAND_MAX * 2 - 1);
    return x;
}

static double value(const uint16_t *x, int64_t i) { return get(x, i, BF16); }

/* bfloat16 has 8 bits; the softmax's weights are rounded too. */
static int differs(double have, double want) { return !(fabs(have - want) <= 0.01 * (1 + fabs(want))); }

static int check_linear(int64_t rows, int64_t depth, int64_t features) {
    uint16_t *x = random_rows(rows * depth), *w = random_rows(features * depth), *bias = random_rows(features);
    uint16_t *y = random_rows(rows * features);
    void *packed = aligned_alloc(64, panels_of(features) * words_of(depth, BF16) * PANEL * 4);
    void *scratch = aligned_alloc(64, ((rows + 15) * (depth + 31) * 4 + 63) / 64 * 64);
    int wrong = 0;
    pack_weight(w, features, depth, packed, BF16);
    const Weight weight = {.packed = packed, .bias = bias, .features = features, .depth = depth};
    FOR_CLASS(linear_bf16)(&(Linear){.weight = weight, .x = x, .ldx = depth, .rows = rows, .y = y, .ldy = features,
                                     .scratch = scratch});
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < features; j++) {
            double sum = value(bias, j);
            for (int64_t k = 0; k < depth; k++) sum += value(x, i * depth + k) * value(w, j * depth + k);
            wrong += differs(value(y, i * features + j), sum);
        }
    printf("linear of %d rows, %d to %d: %d wrong\n", (int)rows, (int)depth, (int)features, wrong);
    return wrong;
}

static int check_attention(int64_t queries, int64_t keys, int64_t dim) {
    enum { HEADS = 6, KV_HEADS = 2, SIZE = 16 };
    const int64_t blocks = (keys + SIZE - 1) / SIZE, block = KV_HEADS * SIZE * dim;
    uint16_t *k = random_rows(blocks * block), *v = random_rows(blocks * block), *q = random_rows(queries * HEADS * dim);
    uint16_t *out = random_rows(queries * HEADS * dim);
    int32_t *table = malloc(blocks * 4), length = (int32_t)keys, starts[2] = {0, (int32_t)queries};
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)(blocks - 1 - i);
    const KvCache cache = {.k = (uint8_t *)k, .v = (uint8_t *)v, .k_block = block * 2, .v_block = block * 2,
                           .kv_heads = KV_HEADS, .block_size = SIZE, .dim = dim, .row_bytes = dim * 2, .kind = BF16};
    const Attention a = {.q = q, .q_stride = HEADS * dim, .cache = &cache, .tables = table, .table_stride = blocks,
                         .seq_lens = &length, .cu_seqlens = starts, .seqs = 1, .heads = HEADS, .scale = 0.125f,
                         .type = BF16, .out = out, .value_dim = dim};
    int wrong = attention_bf16_generic(&a);
    for (int64_t i = 0; i < queries * HEADS; i++) {
        double sum = 0, want[256] = {0};
        for (int64_t j = 0; j <= keys - queries + i / HEADS; j++) {
            const int64_t row = ((table[j / SIZE] * KV_HEADS + i % HEADS / (HEADS / KV_HEADS)) * SIZE + j % SIZE) * dim;
            double score = 0;
            for (int64_t d = 0; d < dim; d++) score += value(q, i * dim + d) * value(k, row + d);
            const double weight = exp(score * 0.125);
            sum += weight;
            for (int64_t d = 0; d < dim; d++) want[d] += weight * value(v, row + d);
        }
        for (int64_t d = 0; d < dim; d++) wrong += differs(value(out, i * dim + d), want[d] / sum);
    }
    printf("attention of %d queries, %d keys of %d: %d wrong\n", (int)queries, (int)keys, (int)dim, wrong);
    return wrong;
}

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

int main(void) {
    if (!has_class(TEXT(CPU_CLASS))) return printf("the processor lacks %s\n", TEXT(CPU_CLASS)), 2;
    int wrong = check_linear(1, 64, 64) + check_linear(3, 70, 50) + check_linear(17, 96, 130) + check_linear(40, 256, 64);
    wrong += check_attention(1, 77, 64) + check_attention(5, 5, 80) + check_attention(40, 130, 64) +
             check_attention(1, 1100, 128);
    return wrong != 0;
}
