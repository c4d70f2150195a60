/* SPDX-License-Identifier: Apache-2.0 */
/* The wiring of the CUDA side: attach at cuInit, decide, detach in forked children. The only place that joins files, ledger and driver. */
#include "shim.h"

#include <pthread.h>
#include <time.h>
#include <limits.h>

#include "account/account.h"
#include "cancel.h"
#include "early.h"
#include "interpose/device.h"
#include "interpose/life_cycle.h"
#include "interpose/object.h"
#include "log.h"
#include "region/container.h"

#define SIBLINGS_PERIOD_NS 100000000 /* how long a dead sibling's memory may stay invisible to cuMemGetInfo */

_Atomic int aq_mode_word;

static struct aq_container container;
static bool attached; /* files are mapped and a slot is ours; under `taking_part` */
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
/* forks wait for it: never held across a call to the driver, which may fork */
static pthread_mutex_t taking_part = PTHREAD_MUTEX_INITIALIZER;
static __thread bool is_taking_part;
/* This thread calls the driver with `starting` held: a tool that is loaded there (CUDA_INJECTION64_PATH) calls the shim. */
static __thread bool is_starting;
static _Atomic uint64_t siblings_looked_at_ns;

bool aq_reclaim(int device)
{
	aq_parts_reclaim(device);
	aq_region_reclaim(&container.region);
	return true;
}

static uint64_t coarse_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void aq_reclaim_siblings(void)
{
	uint64_t now = coarse_now_ns(), before = atomic_load_explicit(&siblings_looked_at_ns, memory_order_relaxed);

	if (now - before >= SIBLINGS_PERIOD_NS && atomic_compare_exchange_strong(&siblings_looked_at_ns, &before, now))
		aq_region_reclaim(&container.region);
}

/* ---- attaching ------------------------------------------------------------------------------------------------- */

/* A child that is forked while another thread opens the files and takes a slot would hold the slot's lock without knowing of it. A thread
 * that does so itself forks in a signal handler, and must not wait for its own end. */
static void before_fork(void)
{
	if (!is_taking_part)
		pthread_mutex_lock(&taking_part);
}

static void after_fork_in_parent(void)
{
	if (!is_taking_part)
		pthread_mutex_unlock(&taking_part);
}

/* A child shares the parent's memory image but neither its slot nor its CUDA: a later cuInit in the child starts from the beginning. */
static void after_fork_in_child(void)
{
	pthread_mutex_init(&starting, NULL);
	pthread_mutex_init(&taking_part, NULL);
	if (!attached)
		return;
	attached = false;
	atomic_store(&aq_mode_word, AQ_UNDECIDED);
	aq_parts_forget();
	aq_region_forget(&container.region);
	aq_limits_unmap(&container.limits);
	aq_node_pages_close(&container.node);
}

/* Before the first lock is taken that a child initialises again; and no fork sees half of this. */
static void watch_forks(void)
{
	static bool watching;

	aq_early_enter();
	if (!watching)
		pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
	watching = true;
	aq_early_leave();
}

static int take_part_locked(struct aq_fault *fault, bool *may_pass)
{
	char library[PATH_MAX];

	if (attached)
		return 0;
	aq_object_own_path(library, sizeof(library));
	if (aq_container_open(&container, library, AQ_REGION_WRITE, may_pass, fault))
		return -1;
	if (aq_region_take_slot(&container.region, fault)) {
		aq_region_unmap(&container.region);
		aq_limits_unmap(&container.limits);
		aq_node_pages_close(&container.node);
		return -1;
	}
	aq_account_open(&container.limits, &container.region, aq_reclaim);
	aq_parts_open(&container);
	attached = true;
	return 0;
}

static int take_part(struct aq_fault *fault, bool *may_pass)
{
	int cancel = aq_hold_cancel(); /* files are opened */

	pthread_mutex_lock(&taking_part);
	is_taking_part = true;
	int failed = take_part_locked(fault, may_pass);
	is_taking_part = false;
	pthread_mutex_unlock(&taking_part);
	aq_allow_cancel(cancel);
	return failed;
}

/* Files first: a container that cannot be limited must not reach the driver. */
static enum aq_mode attach(void)
{
	static bool reported;
	struct aq_fault fault;
	bool may_pass = false;

	if (!take_part(&fault, &may_pass))
		return AQ_LIMITED;
	if (!reported)
		aq_log_error("%s; %s", fault.text,
			     may_pass ? "the container's policy allows this program to use the GPU without limits" : "refusing the GPU");
	reported = true;
	return may_pass ? AQ_PASSING : AQ_REFUSING;
}

static CUresult start_locked(unsigned int flags)
{
	enum aq_mode mode = attach();

	if (mode == AQ_REFUSING) {
		atomic_store(&aq_mode_word, mode);
		return CUDA_ERROR_NOT_PERMITTED;
	}
	is_starting = true;
	CUresult result = aq_cuda.cuInit(flags);
	if (result == CUDA_SUCCESS && mode == AQ_LIMITED)
		result = aq_devices_learn(&container.limits);
	is_starting = false;
	if (result == CUDA_SUCCESS)
		atomic_store_explicit(&aq_mode_word, mode, memory_order_release);
	return result;
}

CUresult aq_start(unsigned int flags)
{
	if (!aq_cuda_bind())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (is_starting || atomic_load_explicit(&aq_mode_word, memory_order_acquire) == AQ_LIMITED)
		return aq_cuda.cuInit(flags);
	watch_forks();
	pthread_mutex_lock(&starting);
	CUresult result = start_locked(flags);
	pthread_mutex_unlock(&starting);
	return result;
}

/* Reached by every call until cuInit, and by all calls of a process that is not limited. */
enum aq_mode aq_decide(void)
{
	enum aq_mode mode = (enum aq_mode)atomic_load_explicit(&aq_mode_word, memory_order_acquire);
	CUcontext context;
	int count;

	if (mode != AQ_UNDECIDED || !aq_cuda_bind())
		return mode;
	if (is_starting)
		return AQ_PASSING;
	/* Without an initialised driver the call fails by itself, and so do both queries; one that fails alone may fail for another reason.
	 * Otherwise the program initialised the driver without the shim's cuInit: start now. */
	if (aq_cuda.cuDeviceGetCount(&count) != CUDA_SUCCESS && aq_cuda.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
		return AQ_PASSING;
	CUresult result = aq_start(0);
	mode = (enum aq_mode)atomic_load_explicit(&aq_mode_word, memory_order_acquire);
	return result == CUDA_SUCCESS ? mode : AQ_REFUSING;
}
