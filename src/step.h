/*
 * Whole steps on a host back end: stages called one after the other through the seam, chunk by chunk.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_STEP_H
#define CSA_STEP_H

#include "plan.h"

#if defined(__cplusplus)
extern "C" {
#endif

csa_step_shape csa_shape_of(const csa_context *context, int64_t tokens, int64_t groups, int64_t regions,
                            int64_t topk);

/* A chunk of a step's tokens, and where its scratch lies. Its regions may be fewer than the step's, where the
 * plan knows that no row sees more. */
typedef struct csa_chunk {
    int64_t first, count, regions;
    const csa_step_shape *shape;
    csa_chunk_arrays scratch;
} csa_chunk;

typedef csa_status (*csa_run_chunk)(const csa_context *context, const csa_step_args *args,
                                    const csa_chunk *chunk);

/* Runs a step chunk by chunk, up to the first that fails. */
csa_status csa_run_chunks(const csa_context *context, const csa_plan *plan, const csa_step_args *args,
                          csa_run_chunk run);

/* Score, select, attend, gate; plan may be NULL. Arguments are checked, regions and topk filled in, and the
 * workspace is large enough. */
csa_status csa_host_step(const csa_context *context, const csa_plan *plan, const csa_step_args *args);

/* Prepare, summarize and the step; prefill tokens under the plan first. */
csa_status csa_host_layer(const csa_context *context, const csa_plan *plan, const csa_layer_args *args);

/* The part of a layer that a plan covers (its tokens and requests), and the decode part behind it. */
csa_tokens csa_prefill_part(const csa_tokens *tokens, const csa_plan *plan);
csa_tokens csa_decode_part(const csa_tokens *tokens, const csa_plan *plan, int64_t all_tokens);

/* Rows [first, first + count); all may be NULL, then every tensor is absent. */
csa_rows csa_slice_rows(const csa_rows *all, int64_t first, int64_t count);

#if defined(__cplusplus)
}
#endif

#endif
