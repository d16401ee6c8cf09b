/* SPDX-License-Identifier: Apache-2.0 */
#include "../step.h"
#include "compat.h"
#include "ref.h"

const csa_stages csa_ref_stages = {
    .prepare = csa_ref_prepare,
    .summarize_decode = csa_ref_summarize_decode,
    .summarize_verify = csa_ref_summarize_verify,
    .summarize_prefill = csa_ref_summarize_prefill,
    .summarize_metadata = csa_ref_summarize_metadata,
    .score = csa_ref_score,
    .select = csa_ref_select,
    .attend = csa_ref_attend,
    .gate = csa_ref_gate,
    .step = csa_host_step,
    .layer = csa_host_layer,
    .compat = &csa_ref_compat_stages,
};
