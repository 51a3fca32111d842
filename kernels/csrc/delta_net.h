/* The arguments of a gated delta net, as kernels/linear_attention/gated_delta_net.py packs them. */
#pragma once
#include <stdint.h>

typedef struct {
    const void *qkvz, *ba;      /* rows `qkvz_stride` and `ba_stride` elements apart */
    const float *taps;          /* [taps_count][channels] */
    const float *rates, *biases; /* [value_heads]: -exp(a_log), dt_bias */
    const float *norm;          /* [value_dim] */
    void *window;               /* [slots][taps_count - 1][channels] */
    float *matrix;              /* [slots][value_heads][key_dim][value_dim] */
    const int64_t *slots;       /* the slot of each sequence */
    const int32_t *seq_lens, *cu_seqlens;
    void *out; /* [tokens][value_heads][value_dim] */
    int64_t qkvz_stride, ba_stride, sequences, tokens, key_heads, value_heads, key_dim, value_dim, taps_count;
    int64_t type, channels;
    float eps, unused;
} DeltaNet;
