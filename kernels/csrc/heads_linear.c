/* One linear for each head (formula and shapes: kernels/layers/heads_linear.py). Each head is computed by one thread. */
#include <omp.h>

#include "sublayers.h"

typedef struct {
    const void *x; /* rows are x_row elements apart, heads x_head; in y they are y_row and y_head apart */
    int64_t x_row, x_head;
    void *y;
    int64_t y_row, y_head;
    const char *packed;
    int64_t packed_bytes; /* bytes of a head's packed weight */
    int64_t heads, rows, features, depth, type;
    char *scratch;
    int64_t scratch_bytes; /* bytes of a thread's scratch */
} HeadsLinear;

void heads_linear(const Kernels *f, const HeadsLinear *l) {
    /* The linear has a parallel region of its own. Inside this one it runs on one thread. */
#pragma omp parallel for schedule(static) if (l->heads > 1)
    for (int64_t head = 0; head < l->heads; head++)
        f->linear[l->type](&(Linear){
            .weight = {.packed = (const uint32_t *)(l->packed + head * l->packed_bytes), .features = l->features,
                       .depth = l->depth},
            .x = at(l->x, head * l->x_head, (int)l->type), .ldx = l->x_row, .rows = l->rows,
            .y = at(l->y, head * l->y_head, (int)l->type), .ldy = l->y_row,
            .scratch = l->scratch + omp_get_thread_num() * l->scratch_bytes});
}
