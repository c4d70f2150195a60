/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_entry.c - cuGetProcAddress: from a name, a CUDA version and the requested default stream to an entry point; and cuGetExportTable.
 *
 * The table is cuda_entries.def: every symbol with its name for lookups and the CUDA version that introduced it. A lookup returns the
 * newest entry with the name that is not newer than the requested version; or its per-thread twin, where there is one and the caller wants
 * it. Names that are newer than the node's driver do not exist.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

struct entry {
	const char *name;
	int since;
	void *function;
	int twin_since;         /* 0: no twin */
	void *twin;
};

#define ENTRY(symbol, base, version) { base, version, (void *)symbol, 0, NULL },
#define TWINS(symbol, base, version, twin, twin_version) { base, version, (void *)symbol, twin_version, (void *)twin },
static const struct entry entries[] = {
#include "simulated_driver/cuda_entries.def"
};
#undef ENTRY
#undef TWINS
#define N_ENTRIES (sizeof entries / sizeof *entries)

static int compare_name(const void *name, const void *entry)
{
	return strcmp(name, ((const struct entry *)entry)->name);
}

/* The table is sorted by name, then by version. */
static const struct entry *first_of(const char *name)
{
	const struct entry *at = bsearch(name, entries, N_ENTRIES, sizeof *entries, compare_name);
	while (at && at > entries && strcmp(at[-1].name, name) == 0)
		at--;
	return at;
}

static void *lookup(const char *name, int version, bool per_thread, CUdriverProcAddressQueryResult *status)
{
	const struct entry *best = NULL, *at = first_of(name);
	int driver_version = 0;
	if (at && (cuDriverGetVersion(&driver_version) != CUDA_SUCCESS || at->since > driver_version))
		at = NULL;
	*status = at ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	for (; at && at < entries + N_ENTRIES && strcmp(at->name, name) == 0; at++)
		if (at->since <= version)
			best = at;
	if (!best)
		return NULL;
	*status = CU_GET_PROC_ADDRESS_SUCCESS;
	return per_thread && best->twin && best->twin_since <= version ? best->twin : best->function;
}

static CUresult check(const char *symbol, void **out, int version, cuuint64_t flags)
{
	const cuuint64_t known = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
	int driver_version;
	SIM_REQUIRE(symbol && out && !(flags & ~known) && flags != known);
	SIM_TRY(cuDriverGetVersion(&driver_version));
	SIM_REQUIRE(version <= driver_version);
	return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	CUdriverProcAddressQueryResult found;
	SIM_TRY(check(symbol, out, version, flags));
	*out = lookup(symbol, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &found);
	if (status)
		*status = found;
	return CUDA_SUCCESS;
}

/* What programs compiled for per-thread default streams call: there the default means their kind of stream. */
CUresult cuGetProcAddress_v2_ptsz(const char *symbol, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	return cuGetProcAddress_v2(symbol, out, version, flags ? flags : CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, status);
}

/* The old form has no status to report it with, so a missing name is an error. */
CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags)
{
	CUdriverProcAddressQueryResult found;
	SIM_TRY(cuGetProcAddress_v2(symbol, out, version, flags, &found));
	return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Private tables belong to NVIDIA's runtime and tools; this driver has no such table, and this is the real driver's reply for that. */
CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
	SIM_REQUIRE(table && id);
	*table = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}
