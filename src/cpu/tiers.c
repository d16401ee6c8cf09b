/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers.h"

#include <string.h>

#if defined(__x86_64__)

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_avx512bf16(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

#endif

static bool always(void)
{
    return true;
}

/* Best first. */
static const csa_cpu_tier tiers[] = {
#if defined(__x86_64__)
    {"avx512-bf16", &csa_cpu_avx512bf16_stages, has_avx512bf16},
    {"avx512", &csa_cpu_avx512_stages, has_avx512},
    {"avx2", &csa_cpu_avx2_stages, has_avx2},
#endif
    {"plain", &csa_cpu_plain_stages, always},
};

const csa_cpu_tier *csa_find_cpu_tier(const char *name)
{
    for (size_t i = 0; i < sizeof tiers / sizeof *tiers; i++)
        if ((!name || strcmp(name, tiers[i].name) == 0) && tiers[i].runs_here())
            return &tiers[i];
    return NULL;
}

const char *csa_cpu_tier_names(void)
{
#if defined(__x86_64__)
    return "avx512-bf16, avx512, avx2, plain";
#else
    return "plain";
#endif
}
