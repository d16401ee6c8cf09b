/*
 * The table of section 9's stages: each runs on the context's device.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

#include "launch.h"

extern const csa_compat_stages csa_cuda_compat_stages = {
    csa_run_on_device<csa_cuda_compat_pack, const csa_compat_pack_args *, int64_t>,
    csa_run_on_device<csa_cuda_compat_schedule, const csa_compat_schedule_args *>,
    csa_run_on_device<csa_cuda_compat_score, const csa_compat_score_args *>,
    csa_run_on_device<csa_cuda_compat_metadata, const csa_compat_metadata_args *, int64_t>,
    csa_run_on_device<csa_cuda_compat_pages, const csa_compat_pages_args *>,
    csa_run_on_device<csa_cuda_compat_attend_paged, const csa_compat_attend_paged_args *>,
    csa_run_on_device<csa_cuda_compat_gather, const csa_compat_gather_args *>,
    csa_run_on_device<csa_cuda_compat_attend_ragged, const csa_compat_attend_ragged_args *>,
    csa_run_on_device<csa_cuda_compat_stage, const csa_compat_stage_args *>,
};

csa_status csa_cuda_load_compat(void)
{
    csa_status (*const load[])(void) = {csa_cuda_load_compat_pack, csa_cuda_load_compat_score,
                                        csa_cuda_load_compat_pages, csa_cuda_load_compat_attend,
                                        csa_cuda_load_compat_copy};
    csa_status status = CSA_OK;
    for (size_t i = 0; i < sizeof load / sizeof *load && status == CSA_OK; i++)
        status = load[i]();
    return status;
}
