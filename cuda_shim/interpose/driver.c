/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/driver.h"

#include <stdatomic.h>
#include <stddef.h>

#include "early.h"

static CUresult missing(void)
{
	return CUDA_ERROR_NOT_SUPPORTED;
}

struct aq_cuda_driver aq_cuda = {
#define HOOK(symbol, base, since, flavour) .symbol = (__typeof__(&symbol))(void *)missing,
#define USE(symbol) .symbol = (__typeof__(&symbol))(void *)missing,
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"
#undef HOOK
#undef USE
};

static struct {
	const char *name;
	void **real;
} const calls[] = {
#define HOOK(symbol, base, since, flavour) { #symbol, (void **)(void *)&aq_cuda.symbol },
#define USE(symbol) { #symbol, (void **)(void *)&aq_cuda.symbol },
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"
#undef HOOK
#undef USE
};

static _Atomic bool bound;

bool aq_cuda_has(const void *real)
{
	return real && real != (const void *)missing;
}

static void bind_locked(const struct aq_object *object)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		void *address = aq_object_symbol(object, calls[i].name);

		if (address)
			*calls[i].real = address;
	}
	atomic_store_explicit(&bound, true, memory_order_release);
}

bool aq_cuda_bind(void)
{
	struct aq_object object;

	if (atomic_load_explicit(&bound, memory_order_acquire))
		return true;
	aq_early_enter();
	if (!atomic_load_explicit(&bound, memory_order_relaxed) &&
	    (aq_object_find(AQ_CUDA_DRIVER_NAME, &object) || aq_object_find(AQ_CUDA_SONAME, &object)))
		bind_locked(&object);
	aq_early_leave();
	return atomic_load_explicit(&bound, memory_order_acquire);
}

void aq_cuda_bind_to(const struct aq_object *object)
{
	aq_early_enter();
	if (!atomic_load_explicit(&bound, memory_order_relaxed))
		bind_locked(object);
	aq_early_leave();
}
