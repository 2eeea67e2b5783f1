// Shared text of the kernels that reduce: what an element is, and how two are combined.
//
// Spliced in where a kernel says #include "operations.cu", behind run_body.cu, whose types it needs; see strided_body.cu
// for why. An operation has `of(a, b)`, where a comes first in the order of the ranks, and `from(a)`, what the first
// one counts for. Whole numbers wrap around, as NumPy's do. The smaller, or greater, of a number and a NaN is the NaN.
// A complex product is rounded by fused additions on a GPU.

template <class T>
struct Complex {
    T real, imag;
};

template <class T>
constexpr bool is_whole = T(1) / T(2) == T(0);

struct Same {
    template <class T>
    static __device__ __forceinline__ T from(T a) { return a; }
};

struct Truth {
    template <class T>
    static __device__ __forceinline__ T from(T a) { return T(a != T(0)); }
};

struct Sum : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b)
    {
        if constexpr (is_whole<T>)
            return T(u64(a) + u64(b));
        else
            return a + b;
    }
    template <class T>
    static __device__ __forceinline__ Complex<T> of(Complex<T> a, Complex<T> b)
    {
        return {a.real + b.real, a.imag + b.imag};
    }
};

struct Prod : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b)
    {
        if constexpr (is_whole<T>)
            return T(u64(a) * u64(b));
        else
            return a * b;
    }
    template <class T>
    static __device__ __forceinline__ Complex<T> of(Complex<T> a, Complex<T> b)
    {
        return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    }
};

template <class T>
__device__ __forceinline__ bool is_nan(T a)
{
    if constexpr (is_whole<T>)
        return false;
    else
        return a != a;
}

struct Min : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a < b || is_nan(a) ? a : b; }
};

struct Max : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a > b || is_nan(a) ? a : b; }
};

struct LogicalAnd : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a != T(0) && b != T(0)); }
};

struct LogicalOr : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a != T(0) || b != T(0)); }
};

struct LogicalXor : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T((a != T(0)) != (b != T(0))); }
};

struct BitwiseAnd : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a & b); }
};

struct BitwiseOr : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a | b); }
};

struct BitwiseXor : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a ^ b); }
};
