// The report's figures: their arguments are in the page. This follows charts.js in one script.
const specs = JSON.parse(document.getElementById("figures").textContent);

if (typeof Plotly === "undefined") {
  document.getElementById("no-script").hidden = false;
  for (const section of document.querySelectorAll(".charts")) section.hidden = true;
} else {
  for (const plot of document.querySelectorAll(".plot")) draw(plot, specs[plot.dataset.figure]);
}

for (const button of document.querySelectorAll(".legend button")) {
  toggles(button, button.closest("figure").querySelector(".plot"), JSON.parse(button.dataset.traces));
}
