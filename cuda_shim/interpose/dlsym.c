/* SPDX-License-Identifier: Apache-2.0 */
/* The preload's dlsym and dlvsym: return a wrapper for a name of the hook table if libc's lookup finds the real driver, and libc's result
 * for all others.
 *
 * No state is kept between calls. A process that looks up other names only is not affected at all. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "interpose/driver.h"
#include "interpose/hooks.h"
#include "interpose/nvml.h"
#include "interpose/object.h"
#include "interpose/text.h"

#define NAME_SLOTS 1024u /* a power of two, several times the rows of both tables */

struct reply {
	void *address;
	unsigned long answered;
};

/* Called from dlsym.S. */
struct reply aq_dlsym_lookup(void *handle, const char *name);
struct reply aq_dlvsym_lookup(void *handle, const char *name, const char *version);
/* Jumped to from dlsym.S; set before a lookup returns. */
extern void *(*_Atomic aq_libc_dlsym)(void *, const char *);
extern void *(*_Atomic aq_libc_dlvsym)(void *, const char *, const char *);
void *(*_Atomic aq_libc_dlsym)(void *, const char *);
void *(*_Atomic aq_libc_dlvsym)(void *, const char *, const char *);

static void *(*_Atomic libc_dlopen)(const char *, int);
static int (*_Atomic libc_dladdr1)(const void *, Dl_info *, void **, int);

static const struct aq_hook *_Atomic names[NAME_SLOTS];

/* ---- preparing ------------------------------------------------------------------------------------------------- */

static const char *const libc_names[] = { "libc.so.6", "libdl.so.2" }; /* in libc since glibc 2.34, in libdl before */

static void *find_in_libc(const char *name)
{
	struct aq_object object;
	void *address = NULL;

	for (unsigned i = 0; i < 2 && !address; i++)
		if (aq_object_find(libc_names[i], &object))
			address = aq_object_symbol(&object, name);
	return address;
}

/* The place of a name in the hash table: its row's, or the empty one where it would be. */
static unsigned place_of(const char *name)
{
	unsigned place = 2166136261u;

	for (const char *c = name; *c; c++)
		place = (place ^ (unsigned char)*c) * 16777619u;
	place %= NAME_SLOTS;
	while (names[place] && !aq_text_is(names[place]->symbol, name))
		place = (place + 1) % NAME_SLOTS;
	return place;
}

static void prepare(void)
{
	aq_libc_dlsym = (void *(*)(void *, const char *))find_in_libc("dlsym");
	aq_libc_dlvsym = (void *(*)(void *, const char *, const char *))find_in_libc("dlvsym");
	libc_dlopen = (void *(*)(const char *, int))find_in_libc("dlopen");
	libc_dladdr1 = (int (*)(const void *, Dl_info *, void **, int))find_in_libc("dladdr1");
	for (size_t i = 0; i < aq_cuda_hook_count; i++)
		names[place_of(aq_cuda_hooks[i].symbol)] = &aq_cuda_hooks[i];
	for (size_t i = 0; i < aq_nvml_hook_count; i++)
		names[place_of(aq_nvml_hooks[i].symbol)] = &aq_nvml_hooks[i];
}

/* The first thread does this, and every thread that arrives meanwhile: each writes the same values, so no thread waits. A child that is
 * forked in the middle does not wait either. */
static void be_prepared(void)
{
	static _Atomic bool prepared;

	if (atomic_load_explicit(&prepared, memory_order_acquire))
		return;
	prepare();
	atomic_store_explicit(&prepared, true, memory_order_release);
}

/* ---- answering ------------------------------------------------------------------------------------------------- */

static const struct reply not_ours = { NULL, 0 };

static struct reply reply(void *address)
{
	return (struct reply){ address, 1 };
}

/* No such symbol; to set the message of dlerror, look up a name that libc does not have. */
static struct reply no_such(const char *name)
{
	void *libc = libc_dlopen(libc_names[0], RTLD_LAZY | RTLD_NOLOAD);

	return reply(libc ? aq_libc_dlsym(libc, name) : NULL);
}

static const char *soname_of(const struct aq_hook *hook)
{
	return hook->base ? AQ_CUDA_SONAME : AQ_NVML_SONAME;
}

/* The search order of the whole process would find our own export. That is right if the driver is there at all. */
static struct reply by_search_order(const struct aq_hook *hook)
{
	struct aq_object driver;

	return aq_object_find(soname_of(hook), &driver) ? reply(hook->wrapper) : no_such(hook->symbol);
}

static bool object_of(const void *address, struct aq_object *object)
{
	struct link_map *map = NULL;
	Dl_info info;

	if (!libc_dladdr1 || !libc_dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
		return false;
	object->base = map->l_addr;
	object->dynamic = map->l_ld;
	return true;
}

/* What libc found for a name of the table: replaced when it is the driver's, in whichever link-map namespace the program keeps it. */
static struct reply by_object(const struct aq_hook *hook, void *found)
{
	struct aq_object object;

	if (aq_object_is_own(found))
		return by_search_order(hook);
	if (!object_of(found, &object) || !aq_object_is(&object, soname_of(hook)))
		return reply(found); /* a program's own function of that name, or a front that applies the limits itself */
	if (hook->base)
		aq_cuda_bind_to(&object);
	else
		aq_nvml_bind_to(&object);
	/* A second copy of the driver has other addresses than the one the wrappers call. */
	return reply(!hook->real || *hook->real == found ? hook->wrapper : found);
}

static bool is_libc(const void *address)
{
	struct aq_object object;

	return object_of(address, &object) && (aq_object_is(&object, libc_names[0]) || aq_object_is(&object, libc_names[1]));
}

/* A program that looks up libc's dlsym gets ours, which does the same and more. */
static struct reply lookup_itself(void *found, void *ours)
{
	return found && is_libc(found) ? reply(ours) : not_ours;
}

static const struct aq_hook *hook_of(const char *name)
{
	if (!name || !((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v')))
		return NULL;
	return names[place_of(name)];
}

struct reply aq_dlsym_lookup(void *handle, const char *name)
{
	be_prepared();
	if (name && aq_text_is(name, "dlsym"))
		return lookup_itself(aq_libc_dlsym(handle, name), (void *)dlsym);
	if (name && aq_text_is(name, "dlvsym"))
		return lookup_itself(aq_libc_dlsym(handle, name), (void *)dlvsym);
	const struct aq_hook *hook = hook_of(name);
	if (!hook)
		return not_ours;
	if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
		return by_search_order(hook);
	void *found = aq_libc_dlsym(handle, name);
	return found ? by_object(hook, found) : reply(NULL);
}

struct reply aq_dlvsym_lookup(void *handle, const char *name, const char *version)
{
	be_prepared();
	if (name && aq_text_is(name, "dlsym"))
		return lookup_itself(aq_libc_dlvsym(handle, name, version), (void *)dlsym);
	if (name && aq_text_is(name, "dlvsym"))
		return lookup_itself(aq_libc_dlvsym(handle, name, version), (void *)dlvsym);
	const struct aq_hook *hook = hook_of(name);
	if (!hook)
		return not_ours;
	if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
		return by_search_order(hook);
	void *found = aq_libc_dlvsym(handle, name, version);
	return found ? by_object(hook, found) : reply(NULL);
}
