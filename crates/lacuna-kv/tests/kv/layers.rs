//! Layers that keep rows of different shapes, another layer's, or none.

use lacuna_kernels::ElementType;
use lacuna_kv::{
    Geometry, Keep, KvCache, KvElements, KvPolicy, Layer, LayerCache, RowSpec, Sequence, Side,
    ValueRows,
};

use crate::support::{POLICIES, cpu, pool};

fn rows(kv_heads: usize, key_dim: usize, value_dim: usize) -> LayerCache {
    LayerCache::Rows(RowSpec {
        kv_heads,
        key_dim,
        value_dim,
        values: ValueRows::Apart,
        keep: Keep::All,
    })
}

/// Two narrow layers side by side, one without rows, a wide one, and one that reads the second's.
fn mixed() -> Geometry {
    let layers = vec![
        rows(2, 12, 8),
        rows(2, 12, 8),
        LayerCache::None,
        rows(1, 40, 40),
        LayerCache::Of(Layer(1)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

/// A number that no other token, layer, side or element has.
fn value(token: usize, layer: Layer, side: Side, element: usize) -> f32 {
    let side = if side == Side::Key { 0 } else { 1 };
    (((token * 8 + layer.0) * 2 + side) * 100 + element) as f32
}

fn extend(sequence: &mut Sequence, geometry: &Geometry, count: usize) {
    let tokens = sequence.len()..sequence.len() + count;
    sequence.prepare(count).expect("room");
    for (layer, spec) in geometry.own_rows() {
        let rows = Side::BOTH.map(|side| {
            let row = |token| {
                (0..spec.row_elements(side)).map(move |element| value(token, layer, side, element))
            };
            tokens.clone().flat_map(row).collect::<Vec<f32>>()
        });
        sequence.write(layer, |side, run| {
            cpu().store_run(run, &side.of(rows.each_ref())[..]);
        });
    }
    sequence.accept(count);
}

fn read(sequence: &Sequence, spec: &RowSpec, layer: Layer, side: Side) -> Vec<f32> {
    let view = sequence.view(layer, side);
    assert_eq!(view.layout().head_dim, spec.head_dim(side));
    let heads = |row| (0..spec.kv_heads).flat_map(move |head| view.head(row, head).to_vec());
    let bytes: Vec<u8> = view.rows().flat_map(heads).collect();
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|&word| f32::from_le_bytes(word)).collect()
}

#[test]
fn every_layer_reads_its_own_rows_and_one_without_reads_those_it_names() {
    let geometry = mixed();
    for name in POLICIES {
        let policy: KvPolicy = name.parse().expect("a policy");
        let cache = KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(400).expect("address space");
        for count in [1, 40, 1, 200, 3] {
            extend(&mut sequence, &geometry, count);
        }
        let fork = sequence.fork().expect("memory");
        for layer in [0, 1, 3, 4].map(Layer) {
            let (source, spec) = geometry.rows(layer).expect("rows to read");
            for side in Side::BOTH {
                let row = |token| {
                    (0..spec.row_elements(side)).map(move |index| value(token, source, side, index))
                };
                let expected: Vec<f32> = (0..245).flat_map(row).collect();
                for sequence in [&sequence, &fork] {
                    let found = read(sequence, &spec, layer, side);
                    assert!(found == expected, "{name}: {layer:?} {side}");
                }
            }
        }
    }
}

/// Work that is submitted to a device finds rows by the distance from the first.
#[test]
fn a_device_has_rows_at_equal_distances_where_they_lie_one_after_the_other() {
    let geometry = mixed();
    for name in POLICIES {
        let policy: KvPolicy = name.parse().expect("a policy");
        let cache = KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(400).expect("address space");
        extend(&mut sequence, &geometry, 50);
        let flat = matches!(policy, KvPolicy::Sparse(_) | KvPolicy::Dense(_));
        let flat = flat && !name.ends_with("head-major");
        for (layer, side) in [0, 1, 3]
            .map(Layer)
            .iter()
            .flat_map(|&layer| Side::BOTH.map(|side| (layer, side)))
        {
            let Some(rows) = sequence.device_rows(layer, side) else {
                assert!(!flat, "{name}");
                continue;
            };
            assert!(flat, "{name}");
            assert_eq!(&rows.layout, sequence.view(layer, side).layout());
            let buffers = sequence.buffers();
            let mut buffers = buffers.iter();
            let buffer = buffers.find(|buffer| buffer.address(0).space == rows.address.space);
            let buffer = buffer.expect("one of the sequence's own");
            let (_, spec) = geometry.rows(layer).expect("rows to read");
            let row = 4 * spec.row_elements(side);
            for token in [0, 49] {
                let start = rows.address.offset as usize + token * rows.layout.row_stride;
                let found = buffer.bytes(start..start + row).expect("memory");
                let words = found.as_chunks::<4>().0.iter();
                let found: Vec<f32> = words.map(|&word| f32::from_le_bytes(word)).collect();
                let expected =
                    (0..spec.row_elements(side)).map(|index| value(token, layer, side, index));
                assert_eq!(
                    found,
                    expected.collect::<Vec<_>>(),
                    "{name}: {layer:?} {side}"
                );
            }
        }
        let named = sequence.device_rows(Layer(4), Side::Key);
        assert_eq!(named, sequence.device_rows(Layer(1), Side::Key));
    }
}

#[test]
#[should_panic(expected = "layer 4 has no rows of its own")]
fn rows_cannot_be_written_to_a_layer_that_reads_anothers() {
    let cache = KvCache::new(mixed(), KvPolicy::default()).expect("the system has pages");
    let mut sequence = cache.sequence(10).expect("address space");
    sequence.prepare(1).expect("room");
    sequence.write(Layer(4), |_, _| {});
}

#[test]
fn layers_without_rows_take_no_memory() {
    let geometry = mixed();
    let policy = KvPolicy::default();
    let cache = KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache");
    let mut sequence = cache.sequence(400).expect("address space");
    assert_eq!(sequence.buffers().len(), 2 * 3);
    extend(&mut sequence, &geometry, 300);
    let report = sequence.report();
    assert_eq!(report.bytes_per_token, 2 * (96 + 64) + 2 * 160);
    let rows = 300 * report.bytes_per_token;
    assert!(report.committed_bytes - rows < 6 * 4096, "{report:?}");
}
