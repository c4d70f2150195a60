/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "interpose/object.h"

#include <elf.h>
#include <string.h>

#include "interpose/text.h"

#define FRONT_MARK ".aliquot-driver." /* only our fronts need a library of such a name */
#define VERSION_HIDDEN 0x8000

struct tables {
	const char *strings;
	const ElfW(Sym) *symbols;
	const ElfW(Versym) *versions;
	const uint32_t *gnu_hash;
	const ElfW(Word) *hash;
	const char *soname;
	bool is_front;
};

/* glibc relocates the addresses in place on the machines CUDA runs on; musl does not. */
static const void *address_in(const struct aq_object *object, const ElfW(Dyn) *entry)
{
	return (const void *)(entry->d_un.d_ptr < object->base ? entry->d_un.d_ptr + object->base : entry->d_un.d_ptr);
}

static struct tables tables_of(const struct aq_object *object)
{
	struct tables tables = { 0 };
	ElfW(Xword) soname = 0;

	for (const ElfW(Dyn) *entry = object->dynamic; entry->d_tag != DT_NULL; entry++) {
		switch (entry->d_tag) {
		case DT_STRTAB: tables.strings = address_in(object, entry); break;
		case DT_SYMTAB: tables.symbols = address_in(object, entry); break;
		case DT_VERSYM: tables.versions = address_in(object, entry); break;
		case DT_GNU_HASH: tables.gnu_hash = address_in(object, entry); break;
		case DT_HASH: tables.hash = address_in(object, entry); break;
		case DT_SONAME: soname = entry->d_un.d_val; break;
		default: break;
		}
	}
	if (!tables.strings)
		return tables;
	if (soname)
		tables.soname = tables.strings + soname;
	for (const ElfW(Dyn) *entry = object->dynamic; entry->d_tag != DT_NULL; entry++)
		if (entry->d_tag == DT_NEEDED && aq_text_has(tables.strings + entry->d_un.d_val, FRONT_MARK))
			tables.is_front = true;
	return tables;
}

/* ---- finding objects ------------------------------------------------------------------------------------------- */

struct search {
	const char *name;
	struct aq_object found;
	bool hit;
};

static bool holds(const struct dl_phdr_info *info, uintptr_t address)
{
	for (ElfW(Half) i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *segment = &info->dlpi_phdr[i];

		if (segment->p_type == PT_LOAD && address - info->dlpi_addr - segment->p_vaddr < segment->p_memsz)
			return true;
	}
	return false;
}

static bool object_of(const struct dl_phdr_info *info, struct aq_object *object)
{
	object->base = info->dlpi_addr;
	object->dynamic = NULL;
	for (ElfW(Half) i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			object->dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	return object->dynamic != NULL;
}

static int match(struct dl_phdr_info *info, size_t bytes, void *context)
{
	struct search *search = context;
	struct aq_object object;

	(void)bytes;
	if (!info->dlpi_name || holds(info, (uintptr_t)&match) || !object_of(info, &object))
		return 0;
	struct tables tables = tables_of(&object);
	bool named = aq_text_is(aq_text_file(info->dlpi_name), search->name) || (tables.soname && aq_text_is(tables.soname, search->name));
	if (!named || tables.is_front)
		return 0;
	search->found = object;
	search->hit = true;
	return 1;
}

bool aq_object_find(const char *name, struct aq_object *object)
{
	struct search search = { .name = name };

	dl_iterate_phdr(match, &search);
	if (search.hit)
		*object = search.found;
	return search.hit;
}

bool aq_object_is(const struct aq_object *object, const char *soname)
{
	struct tables tables = tables_of(object);

	return tables.soname && aq_text_is(tables.soname, soname) && !tables.is_front;
}

static int match_address(struct dl_phdr_info *info, size_t bytes, void *context)
{
	(void)bytes;
	return holds(info, (uintptr_t)context) && holds(info, (uintptr_t)&match_address) ? 1 : 0;
}

bool aq_object_is_own(const void *address)
{
	return dl_iterate_phdr(match_address, (void *)(uintptr_t)address) == 1;
}

struct own_path {
	char *path;
	size_t bytes;
};

static int match_own(struct dl_phdr_info *info, size_t bytes, void *context)
{
	struct own_path *own = context;

	(void)bytes;
	if (!holds(info, (uintptr_t)&match_own))
		return 0;
	size_t length = strlen(info->dlpi_name);
	if (length < own->bytes)
		memcpy(own->path, info->dlpi_name, length + 1);
	return 1;
}

void aq_object_own_path(char *path, size_t bytes)
{
	struct own_path own = { path, bytes };

	path[0] = '\0';
	dl_iterate_phdr(match_own, &own);
}

/* ---- finding symbols ------------------------------------------------------------------------------------------- */

static bool is_definition(const struct tables *tables, uint32_t index, const char *name)
{
	const ElfW(Sym) *symbol = &tables->symbols[index];

	return symbol->st_shndx != SHN_UNDEF &&
	       (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC || ELF64_ST_TYPE(symbol->st_info) == STT_NOTYPE) &&
	       !(tables->versions && (tables->versions[index] & VERSION_HIDDEN)) && aq_text_is(tables->strings + symbol->st_name, name);
}

static uint32_t gnu_hash_of(const char *name)
{
	uint32_t hash = 5381;

	for (; *name; name++)
		hash = hash * 33 + (unsigned char)*name;
	return hash;
}

static uint32_t find_by_gnu_hash(const struct tables *tables, const char *name)
{
	const uint32_t *table = tables->gnu_hash;
	uint32_t buckets = table[0], first = table[1], bloom_words = table[2];
	const uint32_t *bucket = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
	const uint32_t *chain = bucket + buckets;
	uint32_t hash = gnu_hash_of(name);

	if (!buckets)
		return 0;
	for (uint32_t index = bucket[hash % buckets]; index >= first && index; index++) {
		if ((chain[index - first] | 1) == (hash | 1) && is_definition(tables, index, name))
			return index;
		if (chain[index - first] & 1)
			break;
	}
	return 0;
}

static uint32_t find_by_hash(const struct tables *tables, const char *name)
{
	for (uint32_t index = 1; index < tables->hash[1]; index++)
		if (is_definition(tables, index, name))
			return index;
	return 0;
}

void *aq_object_symbol(const struct aq_object *object, const char *name)
{
	struct tables tables = tables_of(object);
	uint32_t index = 0;

	if (!tables.strings || !tables.symbols)
		return NULL;
	if (tables.gnu_hash)
		index = find_by_gnu_hash(&tables, name);
	else if (tables.hash)
		index = find_by_hash(&tables, name);
	return index ? (void *)(object->base + tables.symbols[index].st_value) : NULL;
}
