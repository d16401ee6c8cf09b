/*
 * Section 9: scores from packed pages.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

/* One head as e4m3. */
static void convert_head(const csa_tensor *query, const void *from, uint8_t *to)
{
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
        if (query->dtype == CSA_F32)
            to[i] = csa_float_to_e4m3(((const float *)from)[i]);
        else if (query->dtype == CSA_BF16)
            to[i] = csa_float_to_e4m3(csa_bf16_to_float(((const uint16_t *)from)[i]));
        else
            to[i] = ((const uint8_t *)from)[i];
    }
}

/* The page that holds a region of an entry; NULL if the table does not lead to one. */
static const uint8_t *find_page(const csa_compat_score_args *a, int64_t entry, int64_t region)
{
    int64_t page =
        csa_mapped_block(&a->page_table, entry, region / CSA_COMPAT_PAGE_REGIONS, a->packed.shape[0]);
    return page < 0 ? NULL : csa_at(&a->packed, page, 0, 0);
}

static float page_scale(const uint8_t *page, int64_t slot)
{
    float scale; /* pages need no alignment */
    memcpy(&scale, page + CSA_PAGE_SCALES + slot * (int64_t)sizeof scale, sizeof scale);
    return scale;
}

static void score_row(void *data, int64_t row)
{
    const csa_compat_score_args *a = data;
    int64_t next_n = a->query.shape[1], heads = a->query.shape[2], entry = row / next_n;
    int64_t length = csa_i32(&a->lengths, entry);
    const float *weights = csa_at(&a->weights, entry, row % next_n, 0);
    float *scores = csa_at(&a->scores, row, 0, 0);
    uint8_t query[CSA_MAX_HEADS][CSA_SUMMARY_SIZE];
    for (int64_t head = 0; head < heads; head++)
        convert_head(&a->query, csa_at(&a->query, entry, row % next_n, head), query[head]);
    for (int64_t region = 0; region < a->scores.shape[1]; region++) {
        const uint8_t *page = region < length ? find_page(a, entry, region) : NULL;
        int64_t slot = region % CSA_COMPAT_PAGE_REGIONS;
        scores[region] = region < length ? 0 : -INFINITY;
        if (page)
            scores[region] = csa_ref_score_summary(query[0], CSA_SUMMARY_SIZE, weights, heads,
                                                   page + slot * CSA_SUMMARY_SIZE) *
                             page_scale(page, slot);
    }
}

csa_status csa_ref_compat_score(const csa_context *context, const csa_compat_score_args *args)
{
    return csa_parallel(context, args->scores.shape[0], score_row, (void *)args);
}
