/* An allocator that counts: bytes that are allocated, and the most since the last reset. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long allocated, most;

static void *counted(void *block) {
  if (!block) return block;
  long size = (long)malloc_usable_size(block);
  long now = atomic_fetch_add(&allocated, size) + size, seen = atomic_load(&most);
  while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {
  }
  return block;
}

static void uncounted(void *block) {
  if (block) atomic_fetch_sub(&allocated, (long)malloc_usable_size(block));
}

/* Bytes allocated now, from which the most is counted again; and the most since then. */
long octavo_reset_most(void) {
  long now = atomic_load(&allocated);
  atomic_store(&most, now);
  return now;
}
long octavo_most(void) { return atomic_load(&most); }

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
int posix_memalign(void **block, size_t alignment, size_t size) {
  *block = counted(__libc_memalign(alignment, size));
  return *block ? 0 : ENOMEM;
}
void *realloc(void *block, size_t size) {
  uncounted(block);
  void *grown = __libc_realloc(block, size);
  if (!grown && block && size) counted(block); /* it was left alone */
  return counted(grown);
}
void free(void *block) {
  uncounted(block);
  __libc_free(block);
}
