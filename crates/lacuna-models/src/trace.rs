//! Records of which experts tokens chose, and what slots would have found of them.
//!
//! A record is lines of JSON: what there is, then which experts a token has of a layer, for every token and layer of
//! every pass. Layers are counted among those that have experts, tokens within their pass.
//!
//! ```text
//! {"experts":128,"layers":48}
//! {"pass":0,"layer":0,"token":0,"experts":[17,3,90,4,25,64,101,8]}
//! ```

use std::fmt;
use std::io::{self, BufRead, Write};

use lacuna_kernels::Routes;
use serde::{Deserialize, Serialize};

use crate::plan::ExpertLru;
use crate::program::Program;

/// What a record begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    experts: usize,
    layers: usize,
}

/// What a token has of a layer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    pass: u64,
    layer: usize,
    token: usize,
    experts: Vec<u32>,
}

/// Writes a record while passes are computed.
pub struct TraceWriter {
    out: Box<dyn Write + Send>,
    pass: u64,
    layer: usize,
    line: Line,
    /// The first thing that went wrong: what comes after it is not written.
    failed: Option<io::Error>,
}

impl TraceWriter {
    /// A record of passes of `program`.
    ///
    /// # Errors
    /// What `out` says.
    pub fn new(program: &Program, out: Box<dyn Write + Send>) -> io::Result<Self> {
        let mut writer = Self {
            out,
            pass: 0,
            layer: 0,
            line: Line {
                pass: 0,
                layer: 0,
                token: 0,
                experts: Vec::new(),
            },
            failed: None,
        };
        let header = Header {
            experts: program.routings().map(|it| it.experts).max().unwrap_or(0),
            layers: program.routings().count(),
        };
        write(&mut writer.out, &header)?;
        Ok(writer)
    }

    /// Ends the record.
    ///
    /// # Errors
    /// When something of it could not be written.
    pub fn finish(mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }

    pub(crate) fn begin_pass(&mut self) {
        self.pass += u64::from(self.layer > 0);
        self.layer = 0;
    }

    /// Writes what the tokens of a pass have of the next layer.
    pub(crate) fn write(&mut self, routes: &Routes<'_>, tokens: usize) {
        for token in 0..tokens {
            if self.failed.is_some() {
                break;
            }
            (self.line.pass, self.line.layer, self.line.token) = (self.pass, self.layer, token);
            self.line.experts.clear();
            self.line.experts.extend(routes.experts(token));
            self.failed = write(&mut self.out, &self.line).err();
        }
        self.layer += 1;
    }
}

impl fmt::Debug for TraceWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceWriter")
            .field("pass", &self.pass)
            .finish_non_exhaustive()
    }
}

fn write(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

/// The experts that a pass uses of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerUse {
    /// The layer, counted among those that have experts.
    pub layer: usize,
    /// Tokens of the pass.
    pub tokens: usize,
    /// Its tokens' experts, each once and in ascending order.
    pub experts: Vec<u32>,
}

/// A record that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Experts of the layer that has most.
    pub experts: usize,
    /// Layers that have experts.
    pub layers: usize,
    /// In the order in which passes came to them.
    pub uses: Vec<LayerUse>,
}

/// What is no record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// It cannot be read.
    #[error("the record of experts cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// A line is not what it should be.
    #[error("line {line} of the record of experts: {why}; record it anew")]
    Damaged {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
}

/// Experts and layers that a record may speak of: a hundred times those of any model.
const MOST: usize = 1 << 16;

/// Bytes of a line at most: room for all experts of a layer.
const MOST_LINE_BYTES: u64 = 1 << 20;

impl Trace {
    /// Reads a record.
    ///
    /// # Errors
    /// [`TraceError`], naming the line.
    pub fn read(mut from: impl BufRead) -> Result<Self, TraceError> {
        let (mut text, mut number) = (Vec::new(), 0);
        let mut next = || -> Result<Option<(usize, Vec<u8>)>, TraceError> {
            text.clear();
            number += 1;
            let read = io::Read::take(&mut from, MOST_LINE_BYTES).read_until(b'\n', &mut text)?;
            Ok((read > 0).then(|| (number, text.clone())))
        };
        let Some((line, text)) = next()? else {
            return Err(damaged(1, "it is empty"));
        };
        let header: Header = serde_json::from_slice(&text).map_err(|why| damaged(line, why))?;
        let Header { experts, layers } = header;
        if !(1..=MOST).contains(&experts) || !(1..=MOST).contains(&layers) {
            return Err(damaged(line, "no model has so many experts or layers"));
        }
        let (mut uses, mut last) = (Vec::<LayerUse>::new(), None);
        while let Some((number, text)) = next()? {
            let line: Line = serde_json::from_slice(&text).map_err(|why| damaged(number, why))?;
            let known = line
                .experts
                .iter()
                .all(|expert| (*expert as usize) < experts);
            if line.layer >= layers || !known || line.experts.is_empty() {
                return Err(damaged(number, "a layer or an expert that there is not"));
            }
            let of = Some((line.pass, line.layer));
            match uses.last_mut().filter(|_| last == of) {
                Some(same) => {
                    same.tokens += 1;
                    same.experts.extend(line.experts);
                }
                None => uses.push(LayerUse {
                    layer: line.layer,
                    tokens: 1,
                    experts: line.experts,
                }),
            }
            last = of;
        }
        for of in &mut uses {
            of.experts.sort_unstable();
            of.experts.dedup();
        }
        Ok(Self {
            experts,
            layers,
            uses,
        })
    }

    /// How many experts `slots` slots in each layer would have found, that which was used least recently leaving first: as
    /// a model does, that begins with empty ones.
    ///
    /// # Panics
    /// Without slots.
    #[must_use]
    pub fn replay(&self, slots: usize) -> Replay {
        let mut layers = vec![ExpertLru::new(slots, self.experts); self.layers];
        let mut found = Replay::default();
        for of in &self.uses {
            let lru = &mut layers[of.layer];
            let turn = lru.plan(&of.experts);
            lru.record(&turn);
            found.add(of, turn.hits);
        }
        found
    }
}

fn damaged(line: usize, why: impl fmt::Display) -> TraceError {
    let why = why.to_string();
    TraceError::Damaged { line, why }
}

/// What slots found of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replay {
    /// Experts that were there.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
}

impl Replay {
    /// Adds a use of which `hits` experts were there.
    pub fn add(&mut self, of: &LayerUse, hits: usize) {
        self.hits += hits as u64;
        self.misses += (of.experts.len() - hits) as u64;
    }

    /// The part of experts that was there, 0 of none.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / ((self.hits + self.misses) as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_pass_and_a_layer_are_one_use() {
        let text = concat!(
            "{\"experts\":8,\"layers\":2}\n",
            "{\"pass\":0,\"layer\":0,\"token\":0,\"experts\":[5,1]}\n",
            "{\"pass\":0,\"layer\":0,\"token\":1,\"experts\":[1,2]}\n",
            "{\"pass\":0,\"layer\":1,\"token\":0,\"experts\":[7,0]}\n",
            "{\"pass\":1,\"layer\":0,\"token\":0,\"experts\":[2,5]}\n",
            "{\"pass\":1,\"layer\":1,\"token\":0,\"experts\":[0,3]}\n",
        );
        let trace = Trace::read(text.as_bytes()).expect("a record");
        let uses = trace
            .uses
            .iter()
            .map(|it| (it.layer, it.tokens, it.experts.clone()));
        let expected = [
            (0, 2, vec![1, 2, 5]),
            (1, 1, vec![0, 7]),
            (0, 1, vec![2, 5]),
            (1, 1, vec![0, 3]),
        ];
        assert_eq!(uses.collect::<Vec<_>>(), expected);
        assert_eq!(trace.replay(3), Replay { hits: 3, misses: 6 });
        assert_eq!(trace.replay(2), Replay { hits: 3, misses: 6 });
        assert_eq!(trace.replay(1), Replay { hits: 1, misses: 8 });
    }

    #[test]
    fn what_is_no_record_is_refused_with_its_line() {
        let header = "{\"experts\":8,\"layers\":2}\n";
        for (text, line) in [
            ("".to_owned(), 1),
            ("{}".to_owned(), 1),
            ("{\"experts\":0,\"layers\":2}".to_owned(), 1),
            ("{\"experts\":8,\"layers\":99999999}".to_owned(), 1),
            (format!("{header}[]"), 2),
            (
                format!("{header}{{\"pass\":0,\"layer\":2,\"token\":0,\"experts\":[1]}}"),
                2,
            ),
            (
                format!("{header}{{\"pass\":0,\"layer\":1,\"token\":0,\"experts\":[8]}}"),
                2,
            ),
            (
                format!("{header}{{\"pass\":0,\"layer\":1,\"token\":0,\"experts\":[]}}"),
                2,
            ),
            (format!("{header}{{\"pass\":0,\"layer\""), 2),
        ] {
            match Trace::read(text.as_bytes()) {
                Err(TraceError::Damaged { line: found, .. }) => assert_eq!(found, line, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
