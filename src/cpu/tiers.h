/*
 * The tiers of the cpu back end: the same bodies compiled for several instruction sets, the best one that the
 * processor has chosen at run time.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CPU_TIERS_H
#define CSA_CPU_TIERS_H

#include "../stages.h"

typedef struct csa_cpu_tier {
    const char *name;
    const csa_stages *stages;
    bool (*runs_here)(void);
} csa_cpu_tier;

/* The best tier of this processor, or the one of that name; NULL if it is unknown or cannot run here. */
const csa_cpu_tier *csa_find_cpu_tier(const char *name);

/* All names, comma-separated, best first, for error texts. */
const char *csa_cpu_tier_names(void);

/* Bytes of context scratch per thread that attend uses to cut rows. */
size_t csa_cpu_scratch_bytes(void);

extern const csa_stages csa_cpu_avx512bf16_stages, csa_cpu_avx512_stages, csa_cpu_avx2_stages,
    csa_cpu_plain_stages;

#endif
