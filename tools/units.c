/*
 * Figures for people to read.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "units.h"

#include <stdio.h>

static units_text scaled(double value, double step, const char *const units[])
{
    units_text t;
    int unit = 0;
    for (; value >= step && units[unit + 1]; unit++)
        value /= step;
    snprintf(t.s, sizeof t.s, value >= 100 || unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return t;
}

units_text units_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", NULL};
    return scaled((double)bytes, 1024, units);
}

units_text units_count(uint64_t count)
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E", NULL};
    return scaled((double)count, 1000, units);
}

units_text units_seconds(double seconds)
{
    static const char *const units[] = {"ns", "us", "ms", NULL};
    return scaled(seconds * 1e9, 1000, units);
}
