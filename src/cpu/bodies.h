/*
 * The stages of a tier, and its table: included once per tier, after its vec_*.h. CSA_TIER_STAGES names it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "vec.h"

#include "prepare.h"
#include "summarize.h"

#include "score.h"
#include "select.h"

#include "attend.h"
#include "gate.h"

const csa_stages CSA_TIER_STAGES = {
    .prepare = prepare,
    .summarize_decode = summarize_decode,
    .summarize_verify = summarize_verify,
    .summarize_prefill = summarize_prefill,
    .summarize_metadata = summarize_metadata,
    .score = score,
    .select = select_regions,
    .attend = attend,
    .gate = gate,
    .step = csa_host_step,
    .layer = csa_host_layer,
    .compat = &csa_ref_compat_stages,
    .prepare_and_summarize = prepare_and_summarize,
};
