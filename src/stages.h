/*
 * The seam between the API and the back ends: one function table per back end.
 *
 * Arguments are those of csa.h, checked and normalised by api.c: descriptors complete, every present tensor
 * has its strides filled in (an extent of 1 has the stride it would have without gaps) and the shape its
 * declaration says, the last extent of a tensor of two or more has unit stride, defaults are replaced by their
 * values (topk, query_len, groups), `tokens` and `cache` are never NULL where the declaration needs them.
 * What is in the memory they point to is not checked: ids are bounds-checked by the back end (tokens.h).
 *
 * A stage does not allocate, does not print, and fails only for reasons of its device.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_STAGES_H
#define CSA_STAGES_H

#include <csa/csa_compat.h>

typedef struct csa_compat_stages csa_compat_stages;

typedef struct csa_stages {
    csa_status (*prepare)(const csa_context *context, const csa_prepare_args *args);

    csa_status (*summarize_decode)(const csa_context *context, const csa_summarize_args *args);
    csa_status (*summarize_verify)(const csa_context *context, const csa_summarize_args *args);
    csa_status (*summarize_prefill)(const csa_context *context, const csa_summarize_args *args);
    csa_status (*summarize_metadata)(const csa_context *context, const csa_summarize_args *args);

    /* Prepare, then summarize_decode or (query_len > 1) summarize_verify of the same tokens: for a layer, where
     * a back end can do better than the two calls; else NULL. */
    csa_status (*prepare_and_summarize)(const csa_context *context, const csa_prepare_args *prepare,
                                        const csa_summarize_args *args);

    /* rows_out is written where present; scores may be absent, then only rows_out is written. */
    csa_status (*score)(const csa_context *context, const csa_score_args *args);
    /* selected may have more columns than min(topk, regions) + 1; no current then reaches past the regions. */
    csa_status (*select)(const csa_context *context, const csa_select_args *args);
    csa_status (*attend)(const csa_context *context, const csa_attend_args *args);
    csa_status (*gate)(const csa_context *context, const csa_gate_args *args);

    /* Whole steps; plan is NULL for decode. regions, topk are filled in, the workspace is large enough. */
    csa_status (*step)(const csa_context *context, const csa_plan *plan, const csa_step_args *args);
    csa_status (*layer)(const csa_context *context, const csa_plan *plan, const csa_layer_args *args);

    const csa_compat_stages *compat; /* section 9 */
} csa_stages;

/* The reference's formats, csa_compat.h. `tokens` is how many tokens the step has. */
struct csa_compat_stages {
    csa_status (*pack)(const csa_context *context, const csa_compat_pack_args *args, int64_t tokens);
    csa_status (*schedule)(const csa_context *context, const csa_compat_schedule_args *args);
    csa_status (*score)(const csa_context *context, const csa_compat_score_args *args);
    csa_status (*metadata)(const csa_context *context, const csa_compat_metadata_args *args, int64_t tokens);
    /* columns is W */
    csa_status (*pages)(const csa_context *context, const csa_compat_pages_args *args);
    csa_status (*attend_paged)(const csa_context *context, const csa_compat_attend_paged_args *args);
    csa_status (*gather)(const csa_context *context, const csa_compat_gather_args *args);
    csa_status (*attend_ragged)(const csa_context *context, const csa_compat_attend_ragged_args *args);
    csa_status (*stage)(const csa_context *context, const csa_compat_stage_args *args);
};

extern const csa_stages csa_ref_stages;

#endif
