//! What is measured: every kernel with every storage type, shape and number of tokens asked for.

use std::fmt;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use lacuna_kernels::{AttentionShape, DType, ElementType, Mask};

use super::attention::{ENCODER, GROUPED, LATENT};
use super::{KernelKind, Measured, Row};
use crate::arguments::BenchKernelsArgs;
use lacuna_cli::output::Usage;

/// Rows and columns of weight matrices: Qwen3-0.6B's feed-forward matrices, and a vocabulary.
const MATRICES: [(usize, usize); 3] = [(3072, 1024), (1024, 3072), (32_000, 1024)];

/// Rows of a matrix that is multiplied with a prompt's last token, not with the others.
const VOCABULARY: usize = 32_000;

/// More tokens than this are a prompt; fewer, a token of some sequences, or a draft.
pub(super) const MOST_DECODED: usize = 16;

/// The deepest context that prompts are computed on.
const DEEPEST_PROMPT: usize = 4096;

pub(super) enum Case {
    Matmul(Matmul),
    Attention(Attention),
    Elementwise(Elementwise),
    Barrier,
}

pub(super) struct Matmul {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) tokens: usize,
}

pub(super) struct Attention {
    pub(super) shape: AttentionShape,
    pub(super) element: ElementType,
    /// Cached rows, those of the tokens included.
    pub(super) depth: usize,
    pub(super) tokens: usize,
}

pub(super) struct Elementwise {
    pub(super) kind: KernelKind,
    pub(super) tokens: usize,
}

/// The cases the arguments name.
pub(super) fn cases(args: &BenchKernelsArgs) -> Result<Vec<Case>> {
    let named = |name: &str| {
        args.types.is_empty() || args.types.iter().any(|t| t.eq_ignore_ascii_case(name))
    };
    for name in &args.types {
        let weights = name.parse::<DType>();
        if let (Err(error), Err(_)) = (weights, name.parse::<ElementType>()) {
            return Err(Usage(error.to_string()).into());
        }
    }
    let mut cases = Vec::new();
    for &kind in KernelKind::value_variants() {
        if !args.kernels.is_empty() && !args.kernels.contains(&kind) {
            continue;
        }
        match kind {
            KernelKind::Matmul => {
                for dtype in DType::ALL.into_iter().filter(|dtype| named(dtype.name())) {
                    cases.extend(matmuls(args, dtype).map(Case::Matmul));
                }
            }
            KernelKind::Attention | KernelKind::LatentAttention => {
                let shape = match kind {
                    KernelKind::Attention => GROUPED,
                    _ => LATENT,
                };
                for element in ElementType::ALL.into_iter().filter(|e| named(e.name())) {
                    cases.extend(attentions(args, shape, element).map(Case::Attention));
                }
            }
            KernelKind::EncoderAttention => {
                if named(ElementType::F32.name()) {
                    cases.extend(encoder_attentions(args).map(Case::Attention));
                }
            }
            _ if !args.types.is_empty() => {}
            KernelKind::Barrier => cases.push(Case::Barrier),
            KernelKind::RmsNorm | KernelKind::Rope | KernelKind::SiluMul | KernelKind::Quantize => {
                let tokens = args.tokens.iter().map(|tokens| tokens.get());
                cases.extend(tokens.map(|tokens| Case::Elementwise(Elementwise { kind, tokens })));
            }
        }
    }
    ensure!(
        !cases.is_empty(),
        Usage("no kernel has what --kernel and --type ask for".into())
    );
    Ok(cases)
}

fn matmuls(args: &BenchKernelsArgs, dtype: DType) -> impl Iterator<Item = Matmul> {
    let all = MATRICES.into_iter().flat_map(move |(rows, cols)| {
        args.tokens.iter().map(move |tokens| Matmul {
            dtype,
            rows,
            cols,
            tokens: tokens.get(),
        })
    });
    all.filter(|case| case.rows < VOCABULARY || case.tokens <= MOST_DECODED)
}

fn attentions(
    args: &BenchKernelsArgs,
    shape: AttentionShape,
    element: ElementType,
) -> impl Iterator<Item = Attention> {
    let all = args.depths.iter().flat_map(move |depth| {
        args.tokens.iter().map(move |tokens| Attention {
            shape,
            element,
            depth: depth.get().max(tokens.get()),
            tokens: tokens.get(),
        })
    });
    all.filter(|case| case.depth <= DEEPEST_PROMPT || case.tokens <= MOST_DECODED)
}

/// All tokens that there are at once, in f32: their rows are those of one pass.
fn encoder_attentions(args: &BenchKernelsArgs) -> impl Iterator<Item = Attention> {
    let depths = args.depths.iter().map(|depth| depth.get());
    depths
        .filter(|depth| *depth <= DEEPEST_PROMPT)
        .map(|depth| Attention {
            shape: ENCODER,
            element: ElementType::F32,
            depth,
            tokens: depth,
        })
}

impl Attention {
    fn kind(&self) -> KernelKind {
        match self.shape.mask {
            Mask::Full => KernelKind::EncoderAttention,
            _ if self.shape == LATENT => KernelKind::LatentAttention,
            _ => KernelKind::Attention,
        }
    }
}

impl Case {
    pub(super) fn row(&self, measured: Measured) -> Row {
        let (kernel, storage, shape, tokens) = match self {
            Case::Matmul(case) => (
                KernelKind::Matmul,
                Some(case.dtype.name()),
                Some(format!("{}x{}", case.rows, case.cols)),
                Some(case.tokens),
            ),
            Case::Attention(case) => (
                case.kind(),
                Some(case.element.name()),
                Some(format!("depth {}", case.depth)),
                Some(case.tokens),
            ),
            Case::Elementwise(case) => (case.kind, None, None, Some(case.tokens)),
            Case::Barrier => (KernelKind::Barrier, None, None, None),
        };
        Row {
            kernel,
            storage,
            shape,
            tokens,
            measured,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Matmul(case) => write!(f, "matmul {}", case.dtype),
            Case::Attention(case) => write!(f, "{} {}", case.kind().name(), case.element),
            Case::Elementwise(case) => f.write_str(&case.kind.name()),
            Case::Barrier => f.write_str("barrier"),
        }
    }
}
