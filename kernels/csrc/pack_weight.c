/* Packs a plain weight [features][depth] into the panels of linear.h. Called once, when a model is loaded. */
#include "linear.h"

INLINE uint32_t word(const void *row, int64_t k, int64_t depth, int type) {
    if (type == F32) return ((const uint32_t *)row)[k];
    const uint16_t *pair = (const uint16_t *)row + 2 * k;
    return 2 * k + 1 < depth ? pair[0] | (uint32_t)pair[1] << 16 : 2 * k < depth ? pair[0] : 0;
}

void pack_weight(const void *weight, int64_t features, int64_t depth, uint32_t *packed, int64_t type) {
    const int64_t words = words_of(depth, (int)type), panels = panels_of(features);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < words; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t feature = panel * PANEL + j;
                packed[(panel * words + k) * PANEL + j] =
                    feature < features ? word(at(weight, feature * depth, (int)type), k, depth, (int)type) : 0;
            }
}
