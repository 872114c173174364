"Packaging: everything that setuptools must know is read from settings.ini."

import re
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

parser = ConfigParser(delimiters=["="])
parser.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {
    key.removesuffix("_requirements"): cfg[key].split()
    for key in cfg
    if key.endswith("_requirements")
}


def on_the_web(text):
    "Markdown whose links and pictures are found from anywhere, as an index shows it."
    files = f"{cfg['git_url']}/blob/{cfg['branch']}/"
    pictures = f"{cfg['git_url']}/raw/{cfg['branch']}/"
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{pictures}", text)
    return re.sub(r"(\]\()(?!https?:|#|mailto:)", rf"\g<1>{files}", text)


class WithCourse(build_py):
    "The library, and in a wheel the notebooks, which `grpo-nb lessons` copies out."

    def run(self):
        super().run()
        if self.editable_mode:
            return
        course = Path(self.build_lib) / cfg["lib_path"] / "course"
        shutil.rmtree(course, ignore_errors=True)
        course.mkdir(parents=True)
        shutil.copy("index.ipynb", course)
        for folder in (cfg["nbs_path"], "docs", "recipes"):
            left = shutil.ignore_patterns(
                "index.ipynb", ".ipynb_checkpoints", "site", "__pycache__"
            )
            shutil.copytree(folder, course / folder, ignore=left)


minors = range(int(cfg["min_python"].split(".")[1]), 14)

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=on_the_web(Path("README.md").read_text(encoding="utf-8"))
    if Path("README.md").exists()
    else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Natural Language :: English",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in minors],
    ],
    packages=find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    package_data={cfg["lib_path"]: ["py.typed", "model/*.txt", "widgets/js/*"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],
    },
    cmdclass={"build_py": WithCourse},
    zip_safe=False,
)
