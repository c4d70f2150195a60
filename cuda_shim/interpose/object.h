/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded objects and their symbols, read from the loader's own tables.
 *
 * Why not dlopen and dlsym: the shim may *be* dlsym; and by not importing them it needs no newer libc than 2.17's and no libdl. */
#ifndef AQ_INTERPOSE_OBJECT_H
#define AQ_INTERPOSE_OBJECT_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

struct aq_object {
	uintptr_t base;
	const ElfW(Dyn) *dynamic;
};

/* The first loaded object with this file name or DT_SONAME; skips the shim itself and its other fronts. */
bool aq_object_find(const char *name, struct aq_object *object);
/* Is its DT_SONAME `soname`, and is it no front of ours? */
bool aq_object_is(const struct aq_object *object, const char *soname);
/* Does the address lie in this shim? */
bool aq_object_is_own(const void *address);
/* The address of a function the object defines, or NULL. */
void *aq_object_symbol(const struct aq_object *object, const char *name);
/* The path this shim was loaded from; empty when unknown. */
void aq_object_own_path(char *path, size_t bytes);

#endif
