/* Finding the driver, and answering for it: cuGetProcAddress.
 *
 * The driver is asked first, with the caller's own arguments, and its answer is looked up: real address -> wrapper. So version, flags,
 * status and error codes are the driver's own, and a name we do not know passes through. A driver may answer with an internal
 * address that differs from the exported symbol; so every row of the table is also asked for at its own version and flavour. */
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>

#include "early.h"
#include "interpose/driver.h"
#include "interpose/table.h"
#include "shim.h"

#define ADDRESS_SLOTS 512u /* a power of two, several times the rows of the table */

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
} const driver_calls[] = {
#define USE(symbol) { #symbol, (void **)(void *)&aq_cuda.symbol },
#include "interpose/driver_calls.def"
#undef USE
};

static _Atomic bool bound;
static _Atomic bool answers_known;
static struct { uintptr_t real; void *wrapper; } answers[ADDRESS_SLOTS];

static void set_if_present(const struct aq_object *object, const char *name, void **real)
{
	void *address = aq_object_symbol(object, name);

	if (address)
		*real = address;
}

static void bind_locked(const struct aq_object *object)
{
	for (size_t i = 0; i < aq_cuda_hook_count; i++)
		set_if_present(object, aq_cuda_hooks[i].symbol, aq_cuda_hooks[i].real);
	for (size_t i = 0; i < sizeof(driver_calls) / sizeof(driver_calls[0]); i++)
		set_if_present(object, driver_calls[i].name, driver_calls[i].real);
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

/* ---- cuGetProcAddress ------------------------------------------------------------------------------------------ */

static unsigned place_of(uintptr_t real)
{
	unsigned place = (unsigned)((real >> 4) * 2654435761u) % ADDRESS_SLOTS;

	while (answers[place].real && answers[place].real != real)
		place = (place + 1) % ADDRESS_SLOTS;
	return place;
}

static void learn(void *real, void *wrapper)
{
	if (!real || real == (void *)missing)
		return;
	unsigned place = place_of((uintptr_t)real);
	/* Rows that share one address in the driver are one function; the first row's wrapper serves. */
	if (!answers[place].real) {
		answers[place].wrapper = wrapper;
		atomic_signal_fence(memory_order_release); /* a child forked in between finds no place without its wrapper */
		answers[place].real = (uintptr_t)real;
	}
}

static void *ask(const struct aq_hook *hook)
{
	cuuint64_t flags = hook->flavour == AQ_PER_THREAD ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
	CUdriverProcAddressQueryResult status;
	void *answer = NULL;

	CUresult result = aq_cuda.cuGetProcAddress_v2(hook->base, &answer, hook->since, flags, &status);
	if (result == CUDA_ERROR_NOT_SUPPORTED)
		result = aq_cuda.cuGetProcAddress(hook->base, &answer, hook->since, flags);
	return result == CUDA_SUCCESS ? answer : NULL;
}

/* The CUDA version of the driver, as cuGetProcAddress takes it; as new as can be when the driver does not say. */
static int newest_known(void)
{
	int version = INT_MAX;

	return aq_cuda.cuDriverGetVersion(&version) == CUDA_SUCCESS ? version : INT_MAX;
}

/* What the driver answers for each row; none that is newer than the driver, which may answer with its newest. */
static void ask_all(void **asked)
{
	int newest = newest_known();

	for (size_t i = 0; i < aq_cuda_hook_count; i++)
		asked[i] = aq_cuda_hooks[i].since <= newest ? ask(&aq_cuda_hooks[i]) : NULL;
}

/* The newest form of each name first: a driver that ignores an old version answers with the new form. */
static void learn_all(void *const *asked, enum aq_flavour flavour)
{
	for (size_t i = aq_cuda_hook_count; i-- > 0;)
		if (aq_cuda_hooks[i].flavour == flavour)
			learn(asked[i], aq_cuda_hooks[i].wrapper);
}

static void learn_answers(void)
{
	void *asked[ADDRESS_SLOTS];

	ask_all(asked); /* before the lock: a tool that is called back from there may ask, too */
	aq_early_enter();
	if (!atomic_load_explicit(&answers_known, memory_order_relaxed)) {
		for (size_t i = 0; i < aq_cuda_hook_count; i++)
			learn(*aq_cuda_hooks[i].real, aq_cuda_hooks[i].wrapper);
		/* Twins last: where the driver has none it answers with the other. */
		learn_all(asked, AQ_LEGACY);
		learn_all(asked, AQ_PER_THREAD);
		atomic_store_explicit(&answers_known, true, memory_order_release);
	}
	aq_early_leave();
}

static void replace_answer(CUresult result, void **address)
{
	if (result != CUDA_SUCCESS || !address || !*address)
		return;
	if (!atomic_load_explicit(&answers_known, memory_order_acquire))
		learn_answers();
	unsigned place = place_of((uintptr_t)*address);
	if (answers[place].real)
		*address = answers[place].wrapper;
}

CUresult cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags)
{
	if (!aq_cuda_bind())
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = aq_cuda.cuGetProcAddress(name, address, version, flags);
	replace_answer(result, address);
	return result;
}

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	if (!aq_cuda_bind())
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = aq_cuda.cuGetProcAddress_v2(name, address, version, flags, status);
	replace_answer(result, address);
	return result;
}

/* In programs for per-thread default streams the headers put a function of their own in front of the one above, which says so to it. A
 * driver may have that one, too, and one that has not must not be asked for it. */
CUresult cuGetProcAddress_v2_ptsz(const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	const cuuint64_t said = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

	return cuGetProcAddress_v2(name, address, version, flags & said ? flags : flags | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, status);
}
