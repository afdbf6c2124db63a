//! Line plots as SVG, readable on light and dark pages.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use lacuna_files::OutputFile;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

pub(crate) struct Axis {
    label: &'static str,
    scale: Scale,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scale {
    Linear,
    Logarithmic,
}

impl Axis {
    pub(crate) fn linear(label: &'static str) -> Self {
        Self {
            label,
            scale: Scale::Linear,
        }
    }

    pub(crate) fn logarithmic(label: &'static str) -> Self {
        Self {
            label,
            scale: Scale::Logarithmic,
        }
    }
}

pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Okabe and Ito's colours, which most colour-blind readers can tell apart.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

/// Lines of up to so many points get a mark at each.
const FEW_POINTS: usize = 8;

const SIZE: (u32, u32) = (760, 440);

impl Plot {
    /// Writes the picture.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            let drawn = match self.y.scale {
                Scale::Linear => self.draw(&area, 0.0..self.top() * 1.05),
                Scale::Logarithmic => {
                    self.draw(&area, (self.bottom() / 1.5..self.top() * 1.5).log_scale())
                }
            };
            drawn.map_err(|error| anyhow!("cannot draw the plot: {error}"))?;
        }
        OutputFile::write_whole(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn draw<Y>(
        &self,
        area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        y: Y,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        Y: plotters::coord::ranged1d::AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        area.fill(&WHITE)?;
        let right = self.points().map(|(x, _)| x).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 17))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(62)
            .build_cartesian_2d(0.0..right, y)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .label_style(("sans-serif", 13))
            .draw()?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let style = colour.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), style))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
            // Few points are what was measured, and one alone makes no line.
            if line.points.len() <= FEW_POINTS {
                let marks = line.points.iter();
                chart.draw_series(marks.map(|&at| Circle::new(at, 4, colour.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .label_font(("sans-serif", 13))
            .draw()?;
        area.present()?;
        Ok(())
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.lines
            .iter()
            .flat_map(|line| line.points.iter().copied())
    }

    fn top(&self) -> f64 {
        self.points()
            .map(|(_, y)| y)
            .fold(f64::MIN_POSITIVE, f64::max)
    }

    fn bottom(&self) -> f64 {
        let above_zero = self.points().map(|(_, y)| y).filter(|&y| y > 0.0);
        above_zero.fold(self.top(), f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_names_its_axes_and_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        for y in [Axis::linear("up"), Axis::logarithmic("up")] {
            let path = folder.path().join("plot.svg");
            let plot = Plot {
                title: "A title".into(),
                x: Axis::linear("across"),
                y,
                lines: vec![Line {
                    name: "first line".into(),
                    points: vec![(0.0, 0.0), (1.0, 10.0), (2.0, 1_000.0)],
                }],
            };
            plot.save(&path).expect("written");
            let text = std::fs::read_to_string(path).expect("readable");
            for word in ["<svg", "A title", "across", "up", "first line"] {
                assert!(text.contains(word), "{word}");
            }
        }
    }
}
