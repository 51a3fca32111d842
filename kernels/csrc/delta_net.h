/* The arguments of a gated delta net, as kernels/linear_attention/gated_delta_net.py packs them. */
#pragma once
#include <stdint.h>

typedef struct {
    const void *qkvz, *ba;      /* rows `qkvz_stride` and `ba_stride` elements apart */
    const float *taps;          /* [taps_count][channels] */
    const float *rates, *biases; /* -exp(a_log) [value_heads]; dt_bias [value_heads] or [value_heads][key_dim] */
    const float *norm;          /* [value_dim] */
    void *window;               /* [slots][taps_count - 1][channels] */
    float *matrix;              /* [slots][value_heads][key_dim][value_dim] */
    const int64_t *slots;       /* the slot of each sequence */
    const int32_t *seq_lens, *cu_seqlens;
    void *out; /* [tokens][value_heads][value_dim] */
    int64_t qkvz_stride, ba_stride, sequences, tokens, key_heads, value_heads, key_dim, value_dim, taps_count;
    int64_t type, channels;
    int64_t has_channel_decays, has_sigmoid_gate; /* a decay for each channel of a key; sigmoid(z) in place of silu(z) */
    float eps, beta_scale;
} DeltaNet;
