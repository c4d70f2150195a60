/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_user.c - user objects: memory of the application that lives as long as graphs, and launches of them, refer to it.
 *
 * The application, each graph with its clones and executable forms, and each launch under way hold references. When the last one goes, a
 * thread of the driver calls the destructor, without a lock of the driver.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "simulated_driver/cuda_internal.h"

struct CUuserObject_st {
	struct sim_object object;
	void *data;
	CUhostFn destroy;
	_Atomic uint64_t references;
	CUuserObject next; /* to be destroyed */
};

/* References of a graph or a program to one object. */
struct sim_user_hold {
	CUuserObject object;
	uint64_t count;
	struct sim_user_hold *next;
};

/* ---- the thread ------------------------------------------------------------------------------------------------------ */

static struct {
	pthread_mutex_t lock; /* also taken with an engine's lock held; no lock is taken behind it */
	CUuserObject first, last;
	bool has_thread;
} doomed = { .lock = PTHREAD_MUTEX_INITIALIZER };

static CUuserObject next_doomed(void)
{
	pthread_mutex_lock(&doomed.lock);
	CUuserObject object = doomed.first;
	if (object)
		doomed.first = object->next;
	else
		doomed.has_thread = false;
	pthread_mutex_unlock(&doomed.lock);
	return object;
}

static void *destroy_objects(void *unused)
{
	CUuserObject object;
	char name[16] = "cuda-sim-user";
	prctl(PR_SET_NAME, name);
	while ((object = next_doomed())) {
		object->destroy(object->data);
		sim_object_delete(object);
	}
	return unused;
}

static bool start_thread(void)
{
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);      /* signals are the application's, never delivered here */
	bool started = pthread_create(&thread, NULL, destroy_objects, NULL) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (started)
		pthread_detach(thread);
	return started;
}

/* When no thread can be made now, the next doomed object makes one for both. */
static void doom(CUuserObject object)
{
	pthread_mutex_lock(&doomed.lock);
	object->next = NULL;
	if (doomed.first)
		doomed.last->next = object;
	else
		doomed.first = object;
	doomed.last = object;
	if (!doomed.has_thread)
		doomed.has_thread = start_thread();
	pthread_mutex_unlock(&doomed.lock);
}

/* ---- references ------------------------------------------------------------------------------------------------------ */

static bool is_user_object(CUuserObject object)
{
	return sim_is(object, SIM_KIND_USER_OBJECT) && atomic_load(&object->references);
}

static void release(CUuserObject object, uint64_t count)
{
	if (atomic_fetch_sub(&object->references, count) == count)
		doom(object);
}

void sim_user_holds_release(struct sim_user_hold **holds)
{
	while (*holds) {
		struct sim_user_hold *hold = *holds;
		*holds = hold->next;
		release(hold->object, hold->count);
		free(hold);
	}
}

static struct sim_user_hold *hold_of(struct sim_user_hold *holds, CUuserObject object)
{
	while (holds && holds->object != object)
		holds = holds->next;
	return holds;
}

/* The references exist already. */
static bool add_hold(struct sim_user_hold **holds, CUuserObject object, uint64_t count)
{
	struct sim_user_hold *hold = hold_of(*holds, object);
	if (!hold) {
		hold = malloc(sizeof *hold);
		if (!hold)
			return false;
		*hold = (struct sim_user_hold){ .object = object, .next = *holds };
		*holds = hold;
	}
	hold->count += count;
	return true;
}

bool sim_user_holds_add(struct sim_user_hold **to, const struct sim_user_hold *from)
{
	for (; from; from = from->next) {
		atomic_fetch_add(&from->object->references, 1);
		if (!add_hold(to, from->object, 1)) {
			release(from->object, 1);
			return false;
		}
	}
	return true;
}

/* ---- entry points ---------------------------------------------------------------------------------------------------- */

CUresult cuUserObjectCreate(CUuserObject *out, void *data, CUhostFn destroy, unsigned int references, unsigned int flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && destroy && references && references <= INT_MAX && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
	CUuserObject object = sim_object_new(SIM_KIND_USER_OBJECT, sizeof *object);
	if (!object)
		return CUDA_ERROR_OUT_OF_MEMORY;
	object->data = data;
	object->destroy = destroy;
	atomic_store(&object->references, references);
	*out = object;
	return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(is_user_object(object) && count && count <= INT_MAX);
	atomic_fetch_add(&object->references, count);
	return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(is_user_object(object) && count && count <= INT_MAX && count <= atomic_load(&object->references));
	release(object, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(sim_is(graph, SIM_KIND_GRAPH) && is_user_object(object) && count && count <= INT_MAX);
	SIM_REQUIRE(!(flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE));
	if (!add_hold(sim_graph_user_holds(graph), object, count))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!(flags & CU_GRAPH_USER_OBJECT_MOVE))
		atomic_fetch_add(&object->references, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(sim_is(graph, SIM_KIND_GRAPH) && is_user_object(object) && count && count <= INT_MAX);
	struct sim_user_hold **at = sim_graph_user_holds(graph);
	while (*at && (*at)->object != object)
		at = &(*at)->next;
	struct sim_user_hold *hold = *at;
	SIM_REQUIRE(hold && hold->count >= count);
	hold->count -= count;
	if (hold->count == 0) {
		*at = hold->next;
		free(hold);
	}
	release(object, count);
	return CUDA_SUCCESS;
}
