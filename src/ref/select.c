/*
 * Section 5: the exact, stable choice of regions.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../lists.h"
#include "ref.h"

/* Does region a rank before region b? Larger scores first, -0 equal to +0, NaN last, then the smaller region.
 */
static bool ranks_before(const float *scores, int64_t a, int64_t b)
{
    float x = scores[a], y = scores[b];
    if (isnan(x) || isnan(y))
        return isnan(x) == isnan(y) ? a < b : isnan(y);
    return x == y ? a < b : x > y;
}

/* Restores the heap below position i: each entry ranks after its children, so that the worst is on top. */
static void sink(const float *scores, int64_t *heap, int64_t count, int64_t i)
{
    for (;;) {
        int64_t worst = i;
        for (int64_t child = 2 * i + 1; child <= 2 * i + 2 && child < count; child++)
            if (ranks_before(scores, heap[worst], heap[child]))
                worst = child;
        if (worst == i)
            return;
        int64_t moved = heap[i];
        heap[i] = heap[worst];
        heap[worst] = moved;
        i = worst;
    }
}

/* Leaves the `count` best of the regions [0, candidates) in best, in any order. */
static void choose(const float *scores, int64_t candidates, int64_t *best, int64_t count)
{
    for (int64_t region = 0; region < count; region++)
        best[region] = region;
    for (int64_t i = count / 2 - 1; i >= 0; i--)
        sink(scores, best, count, i);
    for (int64_t region = count; region < candidates; region++)
        if (ranks_before(scores, region, best[0])) {
            best[0] = region;
            sink(scores, best, count, 0);
        }
}

/* Writes the `count` best of the regions [0, candidates), ascending. */
static void choose_ascending(const float *scores, int64_t candidates, int64_t *best, int64_t count)
{
    choose(scores, candidates, best, count);
    int64_t worst = best[0];
    for (int64_t region = 0; region < candidates; region++)
        if (!ranks_before(scores, worst, region))
            *best++ = region;
}

static void select_row(void *data, int64_t row)
{
    const csa_select_args *a = data;
    csa_list list = csa_start_list(a, row);
    if (list.historical < list.current)
        choose_ascending(csa_at(&a->scores, row, 0, 0), list.current, list.best, list.historical);
    else
        for (int64_t region = 0; region < list.current; region++)
            list.best[region] = region;
}

csa_status csa_ref_select(const csa_context *context, const csa_select_args *args)
{
    return csa_parallel(context, args->selected.shape[0], select_row, (void *)args);
}
