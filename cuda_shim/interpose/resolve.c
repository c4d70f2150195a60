/* SPDX-License-Identifier: Apache-2.0 */
/* Answering for the driver: the hook table, and cuGetProcAddress, which answers from it and is itself a row of it.
 *
 * The driver is called first, with the caller's own arguments, and its result is the key of a table: real address -> wrapper. So version,
 * flags, status and error codes are the driver's own, and an unknown name passes through. A driver may return an internal address that
 * differs from the exported symbol; so every row of the table is also looked up at its own version and flavour. */
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>

#include "early.h"
#include "interpose/driver.h"
#include "interpose/hooks.h"

#define ADDRESS_SLOTS 512u /* a power of two, several times the rows of the table */

const struct aq_hook aq_cuda_hooks[] = {
#define HOOK(symbol, base, since, flavour) \
	{ #symbol, #base, since, AQ_##flavour, (void *)symbol, (void **)(void *)&aq_cuda.symbol },
#define ALSO_AS HOOK
#include "interpose/hooks.def"
#undef HOOK
};

const size_t aq_cuda_hook_count = sizeof(aq_cuda_hooks) / sizeof(aq_cuda_hooks[0]);

_Static_assert(2 * sizeof(aq_cuda_hooks) / sizeof(aq_cuda_hooks[0]) <= ADDRESS_SLOTS, "the hook table fills at most half of the places");

static _Atomic bool wrappers_known;
static struct {
	uintptr_t real;
	void *wrapper;
} wrappers[ADDRESS_SLOTS];

static unsigned place_of(uintptr_t real)
{
	unsigned place = (unsigned)((real >> 4) * 2654435761u) % ADDRESS_SLOTS;

	while (wrappers[place].real && wrappers[place].real != real)
		place = (place + 1) % ADDRESS_SLOTS;
	return place;
}

static void learn(void *real, void *wrapper)
{
	if (!aq_cuda_has(real))
		return;
	unsigned place = place_of((uintptr_t)real);
	/* Rows that share one address in the driver are one function; the first row's wrapper serves. */
	if (!wrappers[place].real) {
		wrappers[place].wrapper = wrapper;
		atomic_signal_fence(memory_order_release); /* a child forked in between finds no place without its wrapper */
		wrappers[place].real = (uintptr_t)real;
	}
}

static void *query(const struct aq_hook *hook)
{
	cuuint64_t flags = hook->flavour == AQ_PER_THREAD ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
							  : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
	CUdriverProcAddressQueryResult status;
	void *reply = NULL;

	CUresult result = aq_cuda.cuGetProcAddress_v2(hook->base, &reply, hook->since, flags, &status);
	if (result == CUDA_ERROR_NOT_SUPPORTED)
		result = aq_cuda.cuGetProcAddress(hook->base, &reply, hook->since, flags);
	return result == CUDA_SUCCESS ? reply : NULL;
}

/* The CUDA version of the driver, as cuGetProcAddress takes it; the maximum when the driver does not report it. */
static int newest_known(void)
{
	int version = INT_MAX;

	return aq_cuda.cuDriverGetVersion(&version) == CUDA_SUCCESS ? version : INT_MAX;
}

/* The driver's result for each row; not for rows newer than the driver, for which it may return its newest form. */
static void query_all(void **replies)
{
	int newest = newest_known();

	for (size_t i = 0; i < aq_cuda_hook_count; i++)
		replies[i] = aq_cuda_hooks[i].since <= newest ? query(&aq_cuda_hooks[i]) : NULL;
}

/* The newest form of each name first: a driver that ignores an old version returns the new form. */
static void learn_all(void *const *replies, enum aq_flavour flavour)
{
	for (size_t i = aq_cuda_hook_count; i-- > 0;)
		if (aq_cuda_hooks[i].flavour == flavour)
			learn(replies[i], aq_cuda_hooks[i].wrapper);
}

static void learn_wrappers(void)
{
	void *replies[ADDRESS_SLOTS];

	query_all(replies); /* before the lock: a tool that is called back from there may make lookups, too */
	aq_early_enter();
	if (!atomic_load_explicit(&wrappers_known, memory_order_relaxed)) {
		for (size_t i = 0; i < aq_cuda_hook_count; i++)
			learn(*aq_cuda_hooks[i].real, aq_cuda_hooks[i].wrapper);
		/* Twins last: a driver without them returns the other form. */
		learn_all(replies, AQ_LEGACY);
		learn_all(replies, AQ_PER_THREAD);
		atomic_store_explicit(&wrappers_known, true, memory_order_release);
	}
	aq_early_leave();
}

static void replace_reply(CUresult result, void **address)
{
	if (result != CUDA_SUCCESS || !address || !*address)
		return;
	if (!atomic_load_explicit(&wrappers_known, memory_order_acquire))
		learn_wrappers();
	unsigned place = place_of((uintptr_t)*address);
	if (wrappers[place].real)
		*address = wrappers[place].wrapper;
}

CUresult cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags)
{
	if (!aq_cuda_bind())
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = aq_cuda.cuGetProcAddress(name, address, version, flags);
	replace_reply(result, address);
	return result;
}

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	if (!aq_cuda_bind())
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = aq_cuda.cuGetProcAddress_v2(name, address, version, flags, status);
	replace_reply(result, address);
	return result;
}

/* In programs for per-thread default streams the headers put their own function in front of the one above, which sets the flag. A driver
 * may have that function, too; one without it must not be called with that name. */
CUresult cuGetProcAddress_v2_ptsz(const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	const cuuint64_t stream_flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

	return cuGetProcAddress_v2(name, address, version,
				   flags & stream_flags ? flags : flags | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, status);
}
