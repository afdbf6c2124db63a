//! The constants of each kernel, word for word as its `Params` has them.

use bytemuck::{Pod, Zeroable};

/// No such thing, where a kernel is told where it begins.
pub(crate) const NONE: u32 = u32::MAX;

/// Constants as words.
pub(crate) trait Constants: Pod {
    /// The words, in the order of the kernel's `Params`.
    fn words(&self) -> &[u32] {
        bytemuck::cast_slice(std::slice::from_ref(self))
    }
}

macro_rules! constants {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(crate) struct $name {
            $(pub(crate) $field: $kind),+
        }

        impl Constants for $name {}
    };
}

constants! {
    /// `norm.wgsl`
    Norm {
        source: u32,
        to: u32,
        width: u32,
        groups: u32,
        weight: u32,
        epsilon: f32,
        centered: u32,
        bias: u32,
    }
}

constants! {
    /// `quantize.wgsl`
    Quantize {
        source: u32,
        up: u32,
        function: u32,
        bytes: u32,
        scales: u32,
        sums: u32,
        fours: u32,
        alpha: f32,
        limit: f32,
    }
}

constants! {
    /// `prepare.wgsl`
    Prepare {
        source: u32,
        add: u32,
        factor: f32,
        inner: u32,
        inner_epsilon: f32,
        to: u32,
        width: u32,
        weight: u32,
        epsilon: f32,
        bytes: u32,
        scales: u32,
        sums: u32,
        centered: u32,
    }
}

constants! {
    /// `heads.wgsl`
    Heads {
        queries: u32,
        keys: u32,
        values: u32,
        table: u32,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        norms: u32,
        query_weight: u32,
        key_weight: u32,
        epsilon: f32,
        pairs: u32,
        apart: u32,
        step: u32,
        position: u32,
        first_row: u32,
        key_to: u32,
        key_stride: u32,
        value_to: u32,
        value_stride: u32,
        elements: u32,
    }
}

constants! {
    /// `matrix.wgsl`
    Product {
        input: u32,
        scales: u32,
        sums: u32,
        output: u32,
        stride: u32,
        first_row: u32,
        count: u32,
        row_size: u32,
        skip: u32,
        columns: u32,
        units: u32,
        tokens: u32,
        has_bias: u32,
        tiles: u32,
        order: u32,
        used: u32,
        first_expert: u32,
        experts: u32,
        expert_size: u32,
    }
}

constants! {
    /// `rotate.wgsl`
    Rotate {
        rows: u32,
        table: u32,
        heads: u32,
        head_dim: u32,
        pairs: u32,
        apart: u32,
        step: u32,
        count: u32,
    }
}

constants! {
    /// `store.wgsl`
    Store {
        source: u32,
        position: u32,
        first_row: u32,
        to: u32,
        stride: u32,
        width: u32,
        words: u32,
        element: u32,
        count: u32,
    }
}

constants! {
    /// `attention.wgsl`
    Attend {
        queries: u32,
        states: u32,
        query_heads: u32,
        group: u32,
        key_dim: u32,
        value_dim: u32,
        scale: f32,
        soft_cap: f32,
        mask: u32,
        reach: u32,
        position: u32,
        offset: u32,
        first_token: u32,
        tokens: u32,
        first_partition: u32,
        base_partition: u32,
        partitions: u32,
        first_row: u32,
        key_skip: u32,
        key_stride: u32,
        value_skip: u32,
        value_stride: u32,
        elements: u32,
        ahead: u32,
        split: u32,
        merged: u32,
    }
}

constants! {
    /// `merge.wgsl`
    Merge {
        states: u32,
        output: u32,
        query_heads: u32,
        value_dim: u32,
        mask: u32,
        reach: u32,
        position: u32,
        offset: u32,
        first_token: u32,
        base_partition: u32,
        partitions: u32,
        first_block: u32,
        bytes: u32,
        scales: u32,
        sums: u32,
        ahead: u32,
        merged: u32,
        sinks: u32,
    }
}

constants! {
    /// `elementwise.wgsl`
    #[derive(Default)]
    Elementwise {
        to: u32,
        source: u32,
        count: u32,
        operation: u32,
        function: u32,
        factor: f32,
        alpha: f32,
        limit: f32,
        width: u32,
        first: u32,
        end: u32,
        vector: u32,
        factors: u32,
        stride: u32,
        least: f32,
        most: f32,
    }
}

constants! {
    /// `columns.wgsl`
    Columns {
        source: u32,
        to: u32,
        source_token: u32,
        source_head: u32,
        to_token: u32,
        to_head: u32,
        heads: u32,
        columns: u32,
        count: u32,
    }
}

constants! {
    /// `magnitude.wgsl`
    Magnitude { to: u32, like: u32, width: u32, least: f32, deviations: f32 }
}

constants! {
    /// `route.wgsl`
    Route {
        logits: u32,
        weights: u32,
        choices: u32,
        tiles: u32,
        order: u32,
        experts: u32,
        used: u32,
        scores: u32,
        groups: u32,
        groups_used: u32,
        sum_of_two: u32,
        normalized: u32,
        scale: f32,
        bias: u32,
        expert_scales: u32,
    }
}

constants! {
    /// `bands.wgsl`
    Bands {
        choices: u32,
        count: u32,
        experts: u32,
        tiles: u32,
        most: u32,
        size: u32,
        order: u32,
    }
}

constants! {
    /// `combine.wgsl`
    Combine { source: u32, to: u32, weights: u32, used: u32, width: u32, count: u32 }
}

constants! {
    /// `convolve.wgsl`
    Convolve {
        values: u32,
        tokens: u32,
        channels: u32,
        taps: u32,
        weights: u32,
        bias: u32,
        function: u32,
        state: u32,
        fresh: u32,
    }
}

constants! {
    /// `scan.wgsl`
    Scan {
        queries: u32,
        keys: u32,
        values: u32,
        decay: u32,
        strength: u32,
        tokens: u32,
        key_heads: u32,
        value_heads: u32,
        key_dim: u32,
        value_dim: u32,
        tiled: u32,
        delta: u32,
        scale: f32,
        skip: u32,
        state: u32,
        fresh: u32,
    }
}

constants! {
    /// `likeliest.wgsl`
    Likeliest { source: u32, to: u32, width: u32, run: u32, last: u32 }
}

constants! {
    /// `top_k.wgsl`
    TopK {
        source: u32,
        to: u32,
        width: u32,
        runs: u32,
        step: u32,
        lists: u32,
        count: u32,
        last: u32,
    }
}

constants! {
    /// `store_blocks.wgsl`
    StoreBlocks {
        source: u32,
        position: u32,
        first_row: u32,
        to: u32,
        stride: u32,
        width: u32,
        count: u32,
    }
}

constants! {
    /// `hadamard.wgsl`
    Hadamard { values: u32, block: u32, count: u32 }
}

constants! {
    /// `every.wgsl`
    Every {
        tokens: u32,
        experts: u32,
        tiles: u32,
        most: u32,
        size: u32,
        order: u32,
    }
}
