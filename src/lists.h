/*
 * The shape of a selection list (section 5), which does not depend on how its regions are chosen.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_LISTS_H
#define CSA_LISTS_H

#include "tensor.h"

typedef struct csa_list {
    int64_t current;    /* -1: the row is all -1 */
    int64_t historical; /* entries before the current one, to be chosen among `current` regions */
    int64_t *best;      /* where they go */
} csa_list;

/* Writes a row's padding and its current region. */
static inline csa_list csa_start_list(const csa_select_args *a, int64_t row)
{
    int64_t regions = a->scores.shape[1], width = a->selected.shape[1] - 1;
    int64_t *entries = (int64_t *)csa_at(&a->selected, row, 0, 0);
    csa_list list = {csa_i64(&a->current, row), 0, NULL};
    if (list.current >= regions)
        list.current = regions - 1;
    if (list.current < 0)
        list.current = -1;
    else
        list.historical = list.current < width ? list.current : width;
    list.best = entries + (width - list.historical);
    for (int64_t *padding = entries; padding < list.best; padding++)
        *padding = -1;
    entries[width] = list.current;
    return list;
}

#endif
