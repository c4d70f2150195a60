/* SPDX-License-Identifier: Apache-2.0 */
/*
 * registry.c - the code that compilers put into programs: binaries, kernels and variables, found by host address.
 *
 * Start-up code of every object with kernels registers them (crt/host_runtime.h): a large program has tens of thousands, and most are never
 * used. Registration only stores; a binary is loaded when one of its kernels or variables is asked for first. It needs no context.
 *
 * The table holds one record per host address. A kernel's handle is a key too once it was given out, because any call that takes a host
 * function takes a handle; anything else is refused, where a real driver might crash.
 */
#include "simulated_runtime/runtime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum kind { FUNCTION, VARIABLE, HANDLE };

struct binary {
	const struct fatbin_wrapper *wrapper;
	struct record *records;
	pthread_mutex_t loading;
	CUlibrary library;    /* guarded by `loading` */
};

struct record {
	const void *host;
	struct record *next;          /* in the bucket */
	struct record *next_of_binary;
	enum kind kind;
	struct binary *binary;        /* NULL for a handle */
	const char *name;             /* in the program's image */
	_Atomic(CUkernel) kernel;     /* of a FUNCTION once it was asked for, of a HANDLE always */
	CUlibrary library;            /* of a HANDLE */
};

static struct record **buckets;
static size_t bucket_count, record_count;
static pthread_rwlock_t table = PTHREAD_RWLOCK_INITIALIZER;

/* ---- the table; the caller holds the lock ---------------------------------------------------------------------------- */

static size_t bucket_of(const void *host, size_t count)
{
	return (size_t)(((uintptr_t)host >> 3) * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (count - 1);
}

static struct record *find(const void *host)
{
	struct record *record = bucket_count ? buckets[bucket_of(host, bucket_count)] : NULL;
	while (record && record->host != host)
		record = record->next;
	return record;
}

static bool grow(void)
{
	size_t count = bucket_count ? bucket_count * 2 : 1024;
	struct record **wider = calloc(count, sizeof(*wider));
	if (!wider)
		return false;
	for (size_t i = 0; i < bucket_count; i++)
		for (struct record *record = buckets[i], *next; record; record = next) {
			size_t bucket = bucket_of(record->host, count);
			next = record->next;
			record->next = wider[bucket];
			wider[bucket] = record;
		}
	free(buckets);
	buckets = wider;
	bucket_count = count;
	return true;
}

static struct record *insert(const void *host, enum kind kind)
{
	if (record_count >= bucket_count && !grow())
		return NULL;
	struct record *record = calloc(1, sizeof(*record));
	if (!record)
		return NULL;
	size_t bucket = bucket_of(host, bucket_count);
	record->host = host;
	record->kind = kind;
	record->next = buckets[bucket];
	buckets[bucket] = record;
	record_count++;
	return record;
}

static void remove_record(struct record *record)
{
	struct record **link = &buckets[bucket_of(record->host, bucket_count)];
	while (*link != record)
		link = &(*link)->next;
	*link = record->next;
	record_count--;
	free(record);
}

/* ---- registration, by the program's start-up code -------------------------------------------------------------------- */

/* The handle is opaque to the program. NULL (no memory) is accepted by the calls below, and its kernels are then unknown. */
EXPORT void **__cudaRegisterFatBinary(void *wrapper)
{
	struct binary *binary = calloc(1, sizeof(*binary));
	if (!binary)
		return NULL;
	binary->wrapper = wrapper;
	pthread_mutex_init(&binary->loading, NULL);
	return (void **)binary;
}

/* Nothing is loaded yet, so there is nothing to complete. */
EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
	(void)handle;
}

/* Of programs built with CUDA 12 and before; asks whether the binary can be used, which shows at its first kernel. */
EXPORT char __cudaInitModule(void **handle)
{
	return handle != NULL;
}

static void register_name(void **handle, const void *host, const char *name, enum kind kind)
{
	struct binary *binary = (struct binary *)handle;
	if (!binary)
		return;
	pthread_rwlock_wrlock(&table);
	struct record *record = find(host) ? NULL : insert(host, kind);
	if (record) {
		record->binary = binary;
		record->name = name;
		record->next_of_binary = binary->records;
		binary->records = record;
	}
	pthread_rwlock_unlock(&table);
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int thread_limit, void *unused_tid,
				   void *unused_bid, dim3 *unused_block, dim3 *unused_grid, int *unused_warp)
{
	(void)device, (void)thread_limit, (void)unused_tid, (void)unused_bid, (void)unused_block, (void)unused_grid, (void)unused_warp;
	register_name(handle, host, name, FUNCTION);
}

EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes, int constant,
			      int global)
{
	(void)device, (void)external, (void)bytes, (void)constant, (void)global;
	register_name(handle, host, name, VARIABLE);
}

/* At the end of the program or of a library. A driver that is gone already has unloaded everything. */
EXPORT void __cudaUnregisterFatBinary(void **handle)
{
	struct binary *binary = (struct binary *)handle;
	if (!binary)
		return;
	pthread_rwlock_wrlock(&table);
	for (struct record *record = binary->records, *next; record; record = next) {
		next = record->next_of_binary;
		remove_record(record);
	}
	pthread_rwlock_unlock(&table);
	if (binary->library) {
		rt_forget_kernels(binary->library);
		cu.cuLibraryUnload(binary->library);
	}
	pthread_mutex_destroy(&binary->loading);
	free(binary);
}

/* ---- handles --------------------------------------------------------------------------------------------------------- */

cudaError_t rt_remember_kernel(CUkernel kernel, CUlibrary library)
{
	cudaError_t error = cudaSuccess;
	pthread_rwlock_wrlock(&table);
	struct record *record = find(kernel);
	if (!record)
		record = insert(kernel, HANDLE);
	if (record) {
		record->library = library;
		atomic_store(&record->kernel, kernel);
	} else {
		error = cudaErrorMemoryAllocation;
	}
	pthread_rwlock_unlock(&table);
	return error;
}

void rt_forget_kernels(CUlibrary library)
{
	pthread_rwlock_wrlock(&table);
	for (size_t i = 0; i < bucket_count; i++)
		for (struct record *record = buckets[i], *next; record; record = next) {
			next = record->next;
			if (record->kind == HANDLE && record->library == library)
				remove_record(record);
		}
	pthread_rwlock_unlock(&table);
}

/* ---- lazy loading ---------------------------------------------------------------------------------------------------- */

/* A failure is not kept: the next kernel of the binary tries again, for example with a driver that has room. */
static cudaError_t load(struct binary *binary, CUlibrary *library)
{
	const struct fatbin_wrapper *wrapper = binary->wrapper;
	cudaError_t error = cudaSuccess;
	if (!wrapper || wrapper->magic != FATBIN_WRAPPER_MAGIC)
		return cudaErrorInvalidKernelImage;
	RT_TRY(rt_start());
	pthread_mutex_lock(&binary->loading);
	if (!binary->library)
		error = RT_CALL(cuLibraryLoadData, &binary->library, wrapper->data, NULL, NULL, 0, NULL, NULL, 0);
	*library = binary->library;
	pthread_mutex_unlock(&binary->loading);
	return error;
}

static struct record *find_kind(const void *host, enum kind kind)
{
	pthread_rwlock_rdlock(&table);
	struct record *record = find(host);
	pthread_rwlock_unlock(&table);
	return record && (record->kind == kind || (record->kind == HANDLE && kind == FUNCTION)) ? record : NULL;
}

cudaError_t rt_kernel(const void *function, CUkernel *kernel)
{
	CUlibrary library;
	struct record *record = function ? find_kind(function, FUNCTION) : NULL;
	if (!record)
		return cudaErrorInvalidDeviceFunction;
	*kernel = atomic_load(&record->kernel);
	if (*kernel)
		return cudaSuccess;
	RT_TRY(load(record->binary, &library));
	cudaError_t error = RT_CALL(cuLibraryGetKernel, kernel, library, record->name);
	if (error != cudaSuccess)
		return error == cudaErrorSymbolNotFound ? cudaErrorInvalidDeviceFunction : error;
	atomic_store(&record->kernel, *kernel);    /* another thread stores the same */
	return rt_remember_kernel(*kernel, library);
}

cudaError_t rt_symbol(const void *variable, CUdeviceptr *address, size_t *bytes)
{
	CUlibrary library;
	struct record *record = variable ? find_kind(variable, VARIABLE) : NULL;
	if (!record)
		return cudaErrorInvalidSymbol;
	RT_TRY(load(record->binary, &library));
	cudaError_t error = RT_CALL(cuLibraryGetGlobal, address, bytes, library, record->name);
	return error == cudaErrorSymbolNotFound ? cudaErrorInvalidSymbol : error;
}

EXPORT cudaError_t __cudaGetKernel(CUkernel *kernel, const void *function)
{
	return rt_return(kernel ? rt_kernel(function, kernel) : cudaErrorInvalidValue);
}

static cudaError_t symbol_address(void **address, const void *symbol)
{
	CUdeviceptr device;
	size_t bytes;
	if (!address)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	RT_TRY(rt_symbol(symbol, &device, &bytes));
	*address = (void *)(uintptr_t)device;
	return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
	return rt_return(symbol_address(address, symbol));
}
