/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c - the current device of a thread, and the primary context behind it.
 *
 * The driver's current context comes first: a program that makes its own one current works in it. Otherwise a call that needs a context
 * makes the primary context of the thread's device current. Primary contexts are retained once per process and never released.
 */
#include "simulated_runtime/runtime.h"

#include <pthread.h>
#include <stdatomic.h>

#define MAX_DEVICES 128

static _Thread_local int thread_device;
static _Atomic(CUcontext) primary[MAX_DEVICES];
static pthread_mutex_t retaining = PTHREAD_MUTEX_INITIALIZER;

cudaError_t rt_primary(int ordinal, CUcontext *context)
{
	CUdevice device;
	cudaError_t error = cudaSuccess;
	if (ordinal < 0 || ordinal >= MAX_DEVICES)
		return cudaErrorInvalidDevice;
	*context = atomic_load(&primary[ordinal]);
	if (*context)
		return cudaSuccess;
	RT_TRY(RT_CALL(cuDeviceGet, &device, ordinal));
	pthread_mutex_lock(&retaining);
	*context = atomic_load(&primary[ordinal]);
	if (!*context) {
		error = RT_CALL(cuDevicePrimaryCtxRetain, context, device);
		if (error == cudaSuccess)
			atomic_store(&primary[ordinal], *context);
	}
	pthread_mutex_unlock(&retaining);
	return error;
}

static cudaError_t make_current(int ordinal)
{
	CUcontext context;
	RT_TRY(rt_primary(ordinal, &context));
	return RT_CALL(cuCtxSetCurrent, context);
}

cudaError_t rt_context(void)
{
	CUcontext current;
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuCtxGetCurrent, &current));
	return current ? cudaSuccess : make_current(thread_device);
}

cudaError_t rt_device(int *ordinal)
{
	CUcontext current;
	CUdevice device = thread_device;
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuCtxGetCurrent, &current));
	if (current)
		RT_TRY(RT_CALL(cuCtxGetDevice, &device));
	*ordinal = device;
	return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *ordinal)
{
	return rt_return(ordinal ? rt_device(ordinal) : cudaErrorInvalidValue);
}

/* Since CUDA 12 it makes the context at once. */
static cudaError_t set_device(int ordinal)
{
	RT_TRY(rt_start());
	RT_TRY(make_current(ordinal));
	thread_device = ordinal;
	return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int ordinal)
{
	return rt_return(set_device(ordinal));
}

static cudaError_t device_count(int *count)
{
	if (!count)
		return cudaErrorInvalidValue;
	*count = 0;
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuDeviceGetCount, count));
	return *count ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
	return rt_return(device_count(count));
}

/* The driver wants the peer's context; the current one stays. */
static cudaError_t enable_peer(int peer, unsigned int flags)
{
	CUcontext context;
	RT_TRY(rt_context());
	RT_TRY(rt_primary(peer, &context));
	return RT_CALL(cuCtxEnablePeerAccess, context, flags);
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
	return rt_return(enable_peer(peer, flags));
}
