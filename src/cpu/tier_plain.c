/*
 * Any processor, in the compiler's own vectors.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "begin.h"

#include "vec_plain.h"
#define CSA_TIER_STAGES csa_cpu_plain_stages
#include "bodies.h"

size_t csa_cpu_scratch_bytes(void)
{
    return 2 * sizeof(attend_part) + 64; /* the same in all tiers: no vectors in it; room to align it */
}
