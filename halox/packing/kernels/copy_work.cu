// Shared text of the kernels that copy regions: the work on a chunk of a region.
//
// Kernels splice this file in at #include "copy_work.cu"; strided_body.cu gives the reason, and describes regions.

#include "strided_body.cu"

struct Copy {
    template <class Word>
    static __device__ __forceinline__ Word take(const Word* source, const Word*)
    {
        return *source;
    }
};

struct CopyWork {
    u64 source_base, target_base;

    template <class Word>
    __device__ __forceinline__ void with(const Region& region, u32 first, u32 last) const
    {
        move_words<Copy, Word>(region, source_base, target_base, first, last);
    }

    __device__ __forceinline__ void operator()(const Region& region, u32 first, u32 last) const
    {
#if TILED
        if (is_tiled(region)) {
            with_word(TileWork{source_base, target_base}, region, first, last);
            return;
        }
#endif
        if (WORD_BYTES == 0 && word_of(region) == 0)
            move_runs(region, source_base, target_base, first, last);
        else
            with_word(*this, region, first, last);
    }
};
