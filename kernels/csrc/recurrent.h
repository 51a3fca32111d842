/* The arguments of short convolutions, Mamba-2 and Mamba, as short_conv.py, mamba2.py and selective_scan.py of
 * kernels/linear_attention pack them. */
#pragma once
#include <stdint.h>

/* A depthwise convolution over the tokens of each sequence. */
typedef struct {
    const float *taps, *bias; /* [taps_count][channels], oldest first; [channels] or null */
    void *window;             /* [slots][taps_count - 1][channels] */
    const int64_t *slots;     /* the slot of each sequence */
    const int32_t *seq_lens, *cu_seqlens;
    int64_t sequences, tokens, channels, taps_count, type;
} Convolution;

typedef struct {
    Convolution conv;
    const void *rows; /* [tokens] rows `stride` elements apart: B, C and x of all channels */
    void *out;        /* [tokens][channels] */
    int64_t stride;
} ShortConv;

typedef struct {
    Convolution conv;
    const void *rows;    /* [tokens] rows `stride` elements apart: gate, x, B, C and dt */
    const float *rates, *biases, *skips; /* [heads]: -exp(a_log), dt_bias, D */
    const float *norm;   /* the norm's weight, [heads * head_dim]; null: no norm */
    float *matrix;       /* [slots][heads][head_dim][state_size] */
    float *inputs, *sums; /* scratch: the convolution's output [tokens][channels], y [tokens][heads * head_dim] */
    void *out;           /* [tokens][heads * head_dim] */
    int64_t stride, heads, head_dim, groups, state_size, norm_size, norm_before_gate;
    float dt_min, dt_max, eps, unused;
} Mamba2;

#define MAX_STATE_SIZE 256

/* The scan of a Mamba mixer. The mixer's convolution has the arguments of a ShortConv, whose rows are x. */
typedef struct {
    const void *x;    /* the convolution's output [tokens][channels] */
    const void *dt, *bc, *gate; /* rows `dt_stride`, `bc_stride`, `gate_stride` apart: [channels], B and C, [channels] */
    const float *rates;   /* -exp(a_log) / ln(2), [channels / 16][state_size][16] */
    const float *biases, *skips; /* [channels]: of dt, and D */
    float *matrix;        /* [slots][channels / 16][state_size][16] */
    const int64_t *slots; /* the slot of each sequence */
    const int32_t *seq_lens, *cu_seqlens;
    void *out;            /* [tokens][channels] */
    int64_t dt_stride, bc_stride, gate_stride, sequences, tokens, channels, state_size, type;
} SelectiveScan;
