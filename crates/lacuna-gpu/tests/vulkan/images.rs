//! Rows of images in the place of tokens, which see all of their image.

use lacuna_kernels::ElementType;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::Shown;
use lacuna_models::spec::Grid;

use crate::support::{BOUND, OnDevice, OnProcessor, open_device, relative_l2, some_tokens};

/// Models whose images are seen as a whole, in windows alone, and as text is, with inputs for each layer beside; and where they
/// are split.
const MODELS: [(&str, usize); 3] = [
    ("families/gemma3/hf", 6),
    ("vision/gemma4-dense/hf", 2),
    ("vision/gemma4/hf", 2),
];

/// Numbers about zero, none alike.
fn rows(elements: usize) -> Vec<f32> {
    let number = |index: usize| (index * 37 % 101) as f32 / 50.0 - 1.0;
    (0..elements).map(number).collect()
}

fn images(hidden: usize) -> [Shown; 2] {
    [5..21, 30..46].map(|positions| Shown {
        rows: rows(positions.len() * hidden).into(),
        grid: Grid::square(4),
        positions,
    })
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn tokens_of_images_see_what_they_do_on_the_processor() {
    for (model, layers) in MODELS {
        seen_as_on_the_processor(model, layers);
    }
}

fn seen_as_on_the_processor(model: &str, layers: usize) {
    let mut device = OnDevice::open(model, ElementType::F32);
    let tokens = some_tokens(60, device.vocabulary());
    let images = images(device.model.spec().hidden);
    let mut sequence = device.sequence();
    let found = device.extend_shown(&mut sequence, &tokens, &images);
    let mut processor = OnProcessor::open(model, ElementType::F32);
    let wanted = processor.logits_shown(&tokens, &images);
    let apart = relative_l2(&found, &wanted);
    assert!(apart <= BOUND, "{model}: {apart:e}");
    // What they show matters.
    let without = device.logits(&tokens);
    assert!(relative_l2(&without, &wanted) > 0.1);

    // Segments that end with an image, or between two.
    let mut sequence = device.sequence();
    let mut pieces = Vec::new();
    for part in [0..5, 5..21, 21..25, 25..60] {
        pieces.extend(device.extend_shown(&mut sequence, &tokens[part], &images));
    }
    assert!(pieces == found, "{model}, in pieces");

    // And where the processor places them, and the device goes on.
    let card = open_device();
    let elements = KvElements::both(ElementType::F32);
    let split = OnDevice::behind(&card, (model, layers), elements, KvPolicy::default());
    let mut split = split.expect("the device runs its part");
    let mut sequence = split.sequence();
    let found = split.extend_shown(&mut sequence, &tokens, &images);
    let apart = relative_l2(&found, &wanted);
    assert!(apart <= BOUND, "{model}, split: {apart:e}");
}
