// A fifth bit of each of 32 weights, in a word: those of sixteen weights from `first` on, four to a word, worth 16 each.
fn fifth_bits(bits: u32, first: u32) -> vec4<u32> {
    let four = (vec4<u32>(bits >> first) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
    let apart = (four & vec4<u32>(1u))
        | ((four & vec4<u32>(2u)) << vec4<u32>(7u))
        | ((four & vec4<u32>(4u)) << vec4<u32>(14u))
        | ((four & vec4<u32>(8u)) << vec4<u32>(21u));
    return apart << vec4<u32>(4u);
}
