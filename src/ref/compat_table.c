/* SPDX-License-Identifier: Apache-2.0 */
#include "compat.h"

const csa_compat_stages csa_ref_compat_stages = {
    .pack = csa_ref_compat_pack,
    .schedule = csa_ref_compat_schedule,
    .score = csa_ref_compat_score,
    .metadata = csa_ref_compat_metadata,
    .pages = csa_ref_compat_pages,
    .attend_paged = csa_ref_compat_attend_paged,
    .gather = csa_ref_compat_gather,
    .attend_ragged = csa_ref_compat_attend_ragged,
    .stage = csa_ref_compat_stage,
};
