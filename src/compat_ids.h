/*
 * Checking mode for csa_compat.h: the contents of id tensors, as in check.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_COMPAT_IDS_H
#define CSA_COMPAT_IDS_H

#include "args.h"

void csa_check_compat_score_ids(csa_checker *c, const csa_compat_score_args *a);
void csa_check_compat_metadata_ids(csa_checker *c, const csa_compat_metadata_args *a, int64_t tokens);
void csa_check_compat_pages_ids(csa_checker *c, const csa_compat_pages_args *a);
void csa_check_compat_paged_ids(csa_checker *c, const csa_compat_attend_paged_args *a);
void csa_check_compat_gather_ids(csa_checker *c, const csa_compat_gather_args *a);
void csa_check_compat_ragged_ids(csa_checker *c, const csa_compat_attend_ragged_args *a);
void csa_check_compat_stage_ids(csa_checker *c, const csa_compat_stage_args *a);

#endif
